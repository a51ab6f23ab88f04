"""Private names of torch that adopting a model needs: there, and of use, on the installed torch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from zerograph.core.errors import ConfigError
from zerograph.dryrun.torch_private import simulate_group
from zerograph.graph.torch_private import skip_frame
from zerograph.sharding import torch_private


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    simulate_group(0, 2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Recorder:
    """A backend that runs graphs as they are, and keeps what ``action`` returns for each."""

    def __init__(self, action: Callable[[fx.GraphModule], Any]) -> None:
        self.action, self.found = action, list[Any]()
        torch.compiler.reset()

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.found.append(self.action(gm))
        return gm.forward


def test_a_backend_can_have_a_frame_traced_again() -> None:
    def action(_: fx.GraphModule) -> None:
        if not attempts:
            attempts.append("one")
            raise torch_private.Retrace

    attempts: list[str] = []
    backend = Recorder(action)
    assert torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1)).item() == 2
    assert attempts == ["one"] and backend.found == [None]


def test_our_errors_reach_users_as_they_are() -> None:
    def action(_: fx.GraphModule) -> None:
        with torch_private.errors_reach_users():
            raise ConfigError("wrong", "do it right")

    with pytest.raises(ConfigError, match="wrong") as caught:
        torch.compile(lambda x: x + 1, backend=Recorder(action))(torch.ones(1))
    assert caught.value.hint == "do it right"


def test_traces_are_reported_before_they_begin() -> None:
    seen: list[str] = []

    def starts() -> None:
        seen.append("start")

    backend = Recorder(lambda _: seen.append("compile"))
    for _ in range(2):
        torch_private.before_traces(starts)
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    assert seen == ["start", "compile"]
    torch.compiler.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    assert seen == ["start", "compile", "compile"]


# Which model is called


def _full(model: Net, backend: Recorder) -> nn.Module:
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


def _method(model: Net, backend: Recorder) -> nn.Module:
    model.compile(backend=backend)
    return model


def _any_call(model: Net, backend: Recorder) -> nn.Module:
    torch_private.compile_any_call(model, backend)
    return model


def _forward(model: Net, backend: Recorder) -> nn.Module:
    model.forward = torch.compile(model.forward, backend=backend)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("form", [_full, _method, _any_call, _forward])
def test_the_called_model_and_its_backend(form: Callable[[Net, Recorder], nn.Module]) -> None:
    model, backend = Net(), Recorder(lambda _: torch_private.called_model())
    assert torch_private.backend_given(model) is None
    compiled = form(model, backend)
    assert torch_private.original(compiled) is model
    assert torch_private.backend_given(compiled) is backend
    compiled(torch.ones(2))
    assert backend.found == [(model, backend)]
    assert torch_private.called_model() is None


def test_which_classes_go_into_graphs() -> None:
    allowed = torch.compiler.allow_in_graph(type("Allowed", (Net,), {}))
    assert torch_private.goes_into_graphs(allowed) and not torch_private.goes_into_graphs(Net)
    assert not torch_private.goes_into_graphs(type("Child", (allowed,), {}))


def test_a_module_that_calls_a_compiled_function_is_not_the_model() -> None:
    class Host(Net):
        def forward(self, x: Tensor) -> Tensor:
            return add(super().forward(x))

    backend = Recorder(lambda _: torch_private.called_model())
    add = torch.compile(lambda x: x + 1, backend=backend)
    Host()(torch.ones(2))
    assert backend.found == [None]


def test_the_modules_that_run_innermost_first() -> None:
    class Host(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    host, found = Host(), list[nn.Module]()
    host.net.inner.register_forward_hook(lambda *_: found.extend(dict.fromkeys(torch_private.running_modules())))
    host(torch.ones(2))
    assert found == [host.net.inner, host.net, host]
    assert not list(torch_private.running_modules())


def test_code_without_a_hash_may_run() -> None:
    """Dynamo makes such code behind a graph break; in Python 3.11 a slice among its constants has no hash."""
    ask = lambda: (list(torch_private.running_modules()), torch_private.running_codes())  # noqa: E731
    code = ask.__code__.replace(co_consts=(*ask.__code__.co_consts, slice(0, 1)))
    modules, codes = FunctionType(code, globals())()
    assert not modules
    assert codes[id(code)] is code


GLOBAL = Net()


def test_the_modules_that_a_frame_reads_through() -> None:
    class Holder:
        def __init__(self, model: nn.Module) -> None:
            self.models = {"net": [model]}

        def run(self, x: Tensor) -> Tensor:
            return self.models["net"][0](x)

    def helper(x: Tensor) -> Tensor:
        return model.inner(x)

    model, backend = Net(), Recorder(lambda gm: set(torch_private.modules_read_through(gm)))
    functions: list[tuple[Callable[..., Any], nn.Module]] = [
        (lambda x: model.inner(x) + 1, model),
        (lambda x: helper(x) + 1, model),
        (lambda x: GLOBAL(x) + 1, GLOBAL),
        (Holder(model).run, model),
        (lambda x, inner=model.inner: inner(x), model.inner),
    ]
    for function, _ in functions:
        torch.compile(function, backend=backend)(torch.ones(2))
    assert backend.found == [{expected} for _, expected in functions]


# Parameters


def _sharded(mesh: DeviceMesh, rows: int = 4) -> nn.Parameter:
    local = torch.ones(-(-rows // 2), 2)
    return nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(rows, 2), stride=(2, 1)))


def test_guards_on_rows_do_not_compare_them(mesh: DeviceMesh) -> None:
    def action(_: fx.GraphModule) -> int:
        torch_private.ignore_shard_aliasing()
        guards = torch._guards.TracingContext.get().guards_context.dynamo_guards
        return sum(getattr(guard.create_fn, "func", None) is torch_private._match_alone for guard in guards)

    model = nn.Module()
    model.a, model.b = _sharded(mesh), _sharded(mesh)
    backend = Recorder(action)
    compiled = torch.compile(lambda: model.a.to_local() + model.b.to_local(), backend=backend)
    assert compiled().tolist() == [[2, 2], [2, 2]]
    assert backend.found[0] >= 2


def test_shards_change_in_place(mesh: DeviceMesh) -> None:
    param, other = _sharded(mesh), _sharded(mesh, 6)
    same = DeviceMesh("cpu", [0, 1])
    torch_private.place_on(param, same)  # type: ignore[arg-type]
    assert param.device_mesh is same  # type: ignore[attr-defined]
    torch_private.set_shard(param, other)  # type: ignore[arg-type]
    with torch.no_grad():
        assert param.placements == (Shard(0),) and param.to_local().shape == (3, 2)  # type: ignore[attr-defined]


def test_hooks_are_shared() -> None:
    calls: list[str] = []
    old, new = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    handle = old.register_hook(lambda _: calls.append("gradient"))
    old.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    torch_private.share_hooks(old, new)
    new.sum().backward()
    assert calls == ["gradient", "accumulated"]
    handle.remove()
    new.sum().backward()
    assert calls[2:] == ["accumulated"]


def test_gradients_are_unscaled_in_another_order(mesh: DeviceMesh) -> None:
    seen: list[str] = []

    def reverse(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.extend(str(grad.placements[0]) for grad in args[0])
        torch_private.unscale(op, (list(reversed(args[0])), *args[1:]), kwargs)

    before = dict(DTensor._op_dispatcher._custom_op_handlers)
    try:
        torch_private.handle_op(torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default, reverse)
        grads = [
            DTensor.from_local(torch.ones(2), mesh, [placement], run_check=False)
            for placement in (Replicate(), Shard(0))
        ]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.tensor(0.0), torch.tensor(0.5))  # type: ignore[arg-type]
        assert len(seen) == 2 and grads[0].to_local().tolist() == [0.5, 0.5]
    finally:
        DTensor._op_dispatcher._custom_op_handlers.update(before)


def _loops(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = _breaks(x)
    return x


def _breaks(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x + 1


def test_where_dynamo_gave_up() -> None:
    @functools.wraps(_loops)
    def wrapper(x: torch.Tensor) -> torch.Tensor:
        return _loops(x + 1)

    torch.compile(wrapper, backend="eager")(torch.ones(2))
    file, line = torch_private.line_of_break(_loops.__code__) or ("", 0)
    assert file == __file__ and line == _breaks.__code__.co_firstlineno + 1
    assert torch_private.line_of_break(_breaks.__code__) is None  # in a loop alone a break is the end
    assert torch_private.code_of(wrapper) is _loops.__code__ and torch_private.code_of(len) is None


def test_whose_code_runs_and_whether_calls_are_compiled() -> None:
    assert not torch_private.compiles_calls() and id(sys._getframe().f_code) in torch_private.running_codes()
    seen = []
    seeing = lambda: seen.append((torch_private.compiles_calls(), torch_private.running_codes()))  # noqa: E731
    skip_frame(seeing)
    for calling in (_calling_in_a_loop, _calling, _calling_behind_a_break):
        torch.compile(calling, backend="eager")(torch.ones(2), seeing)
        (compiles, running), (disabled, _) = seen[-2:]
        assert compiles and not disabled
        assert (id(calling.__code__) in running) is (calling is not _calling)
    # Its loop runs as a part of its own, behind the break that comes first.
    _, part = torch_private.parts_of(_calling_behind_a_break.__code__)
    assert running[id(_calling_behind_a_break.__code__)] is part
    assert torch_private.line_of_break(part) is not None
    assert torch_private.line_of_break(_calling_behind_a_break.__code__) is None


def _calling_behind_a_break(x: torch.Tensor, seeing: Callable[[], None]) -> torch.Tensor:
    x = x + 1
    torch._dynamo.graph_break()
    for _ in range(1):
        torch._dynamo.graph_break()
        seeing()
        torch.compiler.disable(seeing)()
    return x


def _calling_in_a_loop(x: torch.Tensor, seeing: Callable[[], None]) -> torch.Tensor:
    for _ in range(1):
        torch._dynamo.graph_break()
        seeing()
        torch.compiler.disable(seeing)()
    return x


def _calling(x: torch.Tensor, seeing: Callable[[], None]) -> torch.Tensor:
    x = x + 1
    torch._dynamo.graph_break()
    seeing()
    torch.compiler.disable(seeing)()
    return x * 2


def test_tensors_in_what_a_forward_returns() -> None:
    first, second = torch.ones(1), torch.zeros(1)
    value = {"first": first, "others": [second, 3, None]}
    assert all(a is b for a, b in zip(torch_private.tensors_of(value), (first, second), strict=True))
    assert torch_private.map_tensors(lambda tensor: tensor + 1, value)["others"][0] == 1


def test_an_operator_of_dtensors_is_answered(mesh: DeviceMesh) -> None:
    def handler(op: Any, args: tuple[Any, ...], _: dict[str, Any]) -> None:
        raise LookupError(f"{op} of {len(args[0])}")

    before = dict(DTensor._op_dispatcher._custom_op_handlers)
    try:
        torch_private.handle_op(torch.ops.c10d.broadcast_.default, handler)
        shard = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        with pytest.raises(LookupError, match=r"c10d\.broadcast_\.default of 1"):
            dist.broadcast(shard, 0)
    finally:
        DTensor._op_dispatcher._custom_op_handlers.clear()
        DTensor._op_dispatcher._custom_op_handlers.update(before)


def test_calls_are_looked_at_before_they_run() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module, twice: bool = False) -> None:
            super().__init__()
            self.module, self.twice = module, twice

    def check(wrapper: nn.Module, module: nn.Module, **options: bool) -> None:
        seen.append((type(wrapper), module, options))

    seen: list[Any] = []
    for _ in range(2):
        torch_private.before(Wrapper, "__init__", check)
    one, two = Net(), Net()
    assert Wrapper(one, twice=True).twice and Wrapper(module=two).module is two
    assert seen == [(Wrapper, one, {"twice": True}), (Wrapper, two, {})]
    torch_private.before(Wrapper, "missing", check)


def test_what_safetensors_writes_passes_one_function() -> None:
    import safetensors.torch

    assert safetensors.torch._find_shared_tensors({"one": torch.ones(1), "two": torch.ones(1)}) in (
        [{"one"}, {"two"}],
        [{"two"}, {"one"}],
    )


def test_a_writer_of_checkpoints_tells_which_files_there_are(tmp_path: Path) -> None:
    def finish(writer: dcp.FileSystemWriter, metadata: Any, results: Any) -> None:
        assert all(path.exists() for path in torch_private.files_written(writer, results))
        found.extend(path.name for path in torch_private.files_written(writer, results))
        writer.fs = object()  # type: ignore[assignment]
        assert torch_private.files_written(writer, results) == []

    class Writer(dcp.FileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata, results)
            finish(self, metadata, results)

    found: list[str] = []
    dcp.save({"one": torch.ones(2)}, storage_writer=Writer(tmp_path), no_dist=True)
    assert found == ["__0_0.distcp"]


def test_meshes_are_forgotten() -> None:
    cached = torch.distributed.tensor.debug._get_python_sharding_prop_cache_info
    torch_private.forget_meshes()
    assert cached().currsize == 0
