"""Every way to ask for ZeroGraph, and the wrappers it must refuse.

Tests ``api.py`` and ``sharding/adoption.py``.
"""

from __future__ import annotations

import copy
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from numerics.compare import Result, check, full_values, mean_over_ranks, mine, seeded
from ranks import run, server
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerograph
from zerograph.core.errors import UnsupportedError, ZeroGraphError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


OPTIONS: dict[str, Any] = {"stage": 3, "compute": "eager"}
Step = Callable[[Tensor], Tensor]
"""A forward pass of a batch to its loss."""


def _plain(module: nn.Module) -> Step:
    return lambda x: module(x).square().mean()


def _torch_compile(module: nn.Module) -> Step:
    return _plain(torch.compile(module, backend=zerograph.backend(**OPTIONS)))


def _module_compile(module: nn.Module) -> Step:
    module.compile(backend=zerograph.backend(**OPTIONS))
    return _plain(module)


def _by_name(module: nn.Module) -> Step:
    return _plain(torch.compile(module, backend="zerograph", options=OPTIONS))


def _by_name_method(module: nn.Module) -> Step:
    module.compile(backend="zerograph", options=OPTIONS)
    return _plain(module)


def _fullgraph(module: nn.Module) -> Step:
    return _plain(torch.compile(module, backend=zerograph.backend(**OPTIONS), fullgraph=True))


def _dynamic(module: nn.Module) -> Step:
    return _plain(torch.compile(module, backend=zerograph.backend(**OPTIONS), dynamic=True))


def _compiled_function(module: nn.Module) -> Step:
    @torch.compile(backend=zerograph.backend(**OPTIONS))
    def step(x: Tensor) -> Tensor:
        return module(x).square().mean()

    return step


def _compiled_function_of_the_model(module: nn.Module) -> Step:
    compiled = torch.compile(lambda model, x: model(x).square().mean(), backend=zerograph.backend(**OPTIONS))
    return lambda x: compiled(module, x)


def _compiled_method(module: nn.Module) -> Step:
    """What Lightning users do: a method of an object that holds the model."""

    class Task:
        def __init__(self) -> None:
            self.model = module

        def training_step(self, x: Tensor) -> Tensor:
            return self.model(x).square().mean()

    return torch.compile(Task().training_step, backend=zerograph.backend(**OPTIONS))


def _compiled_forward(module: nn.Module) -> Step:
    module.forward = torch.compile(module.forward, backend=zerograph.backend(**OPTIONS))
    return _plain(module)


def _sharded_first(module: nn.Module) -> Step:
    backend = zerograph.backend(**OPTIONS)
    assert zerograph.shard(module, backend) is module
    return _plain(torch.compile(module, backend=backend))


def _sharded_and_never_compiled(module: nn.Module) -> Step:
    return _plain(zerograph.shard(module, zerograph.backend(**OPTIONS)))


def _layer_by_layer(module: nn.Module) -> Step:
    """Regional compilation: blocks are compiled, the model around them is not."""
    backend = zerograph.backend(**OPTIONS)
    zerograph.shard(module, backend)
    module.up, module.down = torch.compile(module.up, backend=backend), torch.compile(module.down, backend=backend)
    return _plain(module)


def _a_part_has_another_backend(module: nn.Module) -> Step:
    """Dynamo compiles the part with the model around it, and its own backend sees nothing."""
    module.up.compile(backend=zerograph.backend(**OPTIONS))
    return _module_compile(module)


def _training_step_with_backward(module: nn.Module) -> Step:
    """Backward inside of the compiled function; Dynamo breaks the graph there."""
    backend = zerograph.backend(**OPTIONS)

    @torch.compile(backend=backend)
    def step(x: Tensor) -> Tensor:
        loss = module(x).square().mean()
        loss.backward()
        return loss.detach()

    return step


FORMS = [
    _torch_compile, _module_compile, _by_name, _by_name_method, _fullgraph, _dynamic, _compiled_function,
    _compiled_function_of_the_model, _compiled_method, _compiled_forward, _sharded_first, _sharded_and_never_compiled,
    _layer_by_layer, _a_part_has_another_backend, _training_step_with_backward,
]  # fmt: skip


def _train(form: Callable[[nn.Module], Step]) -> Result:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    step, losses = form(module), []
    for seed in range(3):
        batch = torch.randn(4, 6, generator=seeded(seed))
        loss = step(batch if form is _plain else mine([batch])[0])
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss if form is _plain else mean_over_ranks(loss)).item())
    values = full_values(module)
    return Result(losses, {name.replace("_orig_mod.", ""): value for name, value in values.items()})


def _pair(form: Callable[[nn.Module], Step]) -> dict[int | None, Result]:
    return {None: _train(_plain), 3: _train(form)}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.strip("_"))
def test_form(form: Callable[[nn.Module], Step]) -> None:
    check(run(2, _pair, form)[1])


def _state_dict_keys() -> tuple[list[str], list[str], bool]:
    module = Net()
    before = list(module.state_dict())
    module.compile(backend=zerograph.backend(**OPTIONS))
    module(torch.ones(2, 6))
    return before, list(module.state_dict()), isinstance(module, Net) and isinstance(module.up, nn.Linear)


def test_module_compile_leaves_keys_and_classes_alone() -> None:
    before, after, same = run(2, _state_dict_keys)[0]
    assert before == after and same


def _traces(form: Callable[[nn.Module], Step]) -> int:
    """How often Dynamo went through the forward of a first call."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        translator = torch._dynamo.symbolic_convert.InstructionTranslator
        run_translator = translator.run
        patch.setattr(translator, "run", lambda self: seen.append(self.f_code.co_name) or run_translator(self))
        form(Net())(torch.ones(2, 6))
    return seen.count("forward")


@pytest.mark.parametrize(
    "form", [_torch_compile, _module_compile, _compiled_forward], ids=lambda form: form.__name__.strip("_")
)
def test_the_first_call_of_a_model_traces_it_once(form: Callable[[nn.Module], Step]) -> None:
    assert run(2, _traces, form) == [1, 1]


def _backend_of_a_name() -> tuple[int, bool]:
    model = torch.compile(Net(), backend="zerograph", options=OPTIONS)
    try:
        zerograph.backend_of(model)
        early = False
    except ZeroGraphError:
        early = True
    model(torch.ones(2, 6))
    return zerograph.backend_of(model).config.stage, early


def test_backend_of_a_model_compiled_by_name() -> None:
    assert run(2, _backend_of_a_name) == [(3, True)] * 2


# Wrappers.


def _wrapped(which: str, how: str) -> str:
    torch._dynamo.reset()
    module: nn.Module = Net()
    if which == "DistributedDataParallel":
        module = DistributedDataParallel(module)
    else:
        fully_shard(module.up)
        fully_shard(module)
    backend = zerograph.backend(**OPTIONS)
    try:
        if how == "shard":
            zerograph.shard(module, backend)
        elif how == "method":
            module.compile(backend=backend)
        model = torch.compile(module, backend=backend) if how == "torch.compile" else module
        model(torch.ones(2, 6)).sum().backward()
    except UnsupportedError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["torch.compile", "method", "shard"])
@pytest.mark.parametrize("which", ["DistributedDataParallel", "fully_shard"])
def test_refuses_models_that_something_else_distributes(which: str, how: str) -> None:
    for message in run(2, _wrapped, which, how):
        assert "hint:" in message
        assert which in message or "FSDP" in message


class Around(nn.Module):
    """Something that calls a model, with a layer of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.own = model, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.model(x))


def _compiled(stage: int = 3) -> nn.Module:
    module = Net()
    module.compile(backend=zerograph.backend(stage=stage, compute="eager"))
    return module


def _sharded(stage: int) -> nn.Module:
    module, backend = Net(), zerograph.backend(stage=stage, compute="eager")
    zerograph.shard(module, backend)
    module.compile(backend=backend)
    return module


def _called(stage: int) -> nn.Module:
    module = _compiled(stage)
    module(torch.ones(2, 6)).sum().backward()
    return module


def _wrap_a_part() -> nn.Module:
    module = _compiled()
    module.up = DistributedDataParallel(module.up)
    return module


def _wrapped_first() -> nn.Module:
    module = Net()
    wrapper = DistributedDataParallel(module)
    module.compile(backend=zerograph.backend(**OPTIONS))
    return wrapper


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "DDP": lambda: DistributedDataParallel(_compiled()),
    "DDP at stage 0": lambda: DistributedDataParallel(_compiled(0)),
    "DDP of torch.compile": lambda: DistributedDataParallel(torch.compile(Net(), backend=zerograph.backend(**OPTIONS))),
    "DDP of what is around": lambda: DistributedDataParallel(Around(_compiled())),
    "DDP, then compiled": _wrapped_first,
    "DDP of a part": _wrap_a_part,
    "DDP of a sharded model": lambda: DistributedDataParallel(_sharded(3)),
    "DDP of one sharded at stage 0": lambda: DistributedDataParallel(_sharded(0)),
    "DDP after the first call": lambda: DistributedDataParallel(_called(2)),
    "FSDP": lambda: FullyShardedDataParallel(_compiled(), device_id=torch.device("cpu")),
    "FSDP of what is around": lambda: FullyShardedDataParallel(Around(_compiled()), device_id=torch.device("cpu")),
    "FSDP of a sharded model": lambda: FullyShardedDataParallel(_sharded(3), device_id=torch.device("cpu")),
    "fully_shard": lambda: fully_shard(_compiled()),
    "fully_shard of what is around": lambda: fully_shard(Around(_compiled())),
}


def _outcomes() -> dict[str, str]:
    """Of each way to put a wrapper over a model that has a backend: the error that it ends in."""
    found = {}
    for name, make in WRAPPED.items():
        torch._dynamo.reset()
        try:
            model = make()
            optimizer = torch.optim.SGD(model.parameters())
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()  # where FSDP has the parameters, Dynamo asks no backend
            found[name] = "no error"
        except UnsupportedError as error:
            found[name] = str(error)
    return found


def test_a_wrapper_over_a_model_that_has_a_backend_is_refused() -> None:
    for found in run(2, _outcomes):
        for name, reason in found.items():
            kinds = {"DDP": "DistributedDataParallel", "FSDP": "FullyShardedDataParallel", "fully_shard": "FSDP"}
            assert kinds[name.split()[0].rstrip(",")] in reason and "hint: leave" in reason and "ZeroGraph" in reason, (
                name,
                reason,
            )


def _beside(ignored: bool) -> tuple[float, float]:
    """DDP trains what is around a sharded model, whose parameters are frozen, or which it was told to ignore."""
    torch.manual_seed(0)
    outer = Around(Net())
    if ignored:
        names = [name for name, _ in outer.named_parameters() if name.startswith("model.")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(outer, names)
    else:
        outer.model.requires_grad_(False)
    outer.model.compile(backend=zerograph.backend(**OPTIONS))
    wrapper = DistributedDataParallel(outer)
    x = torch.full((2, 6), 1.0 + dist.get_rank())
    wrapper(x).square().sum().backward()
    inner = outer.model.up.weight.grad
    return outer.own.weight.grad.sum().item(), 0.0 if inner is None else inner.full_tensor().sum().item()


def _beside_plain() -> tuple[float, float]:
    torch.manual_seed(0)
    outer = Around(Net())
    sum(outer(torch.full((2, 6), value)).square().sum() for value in (1.0, 2.0)).div(2).backward()
    return outer.own.weight.grad.sum().item(), outer.model.up.weight.grad.sum().item()


def test_a_wrapper_may_train_what_is_around_a_sharded_model() -> None:
    own, inner = _beside_plain()
    assert run(2, _beside, False) == [pytest.approx((own, 0.0))] * 2
    assert run(2, _beside, True) == [pytest.approx((own, inner))] * 2


# Nothing compiled.


def _never_compiled() -> str:
    """module.compile() of a container of torch.nn compiles nothing, and Dynamo does not say so."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    model.compile(backend=zerograph.backend(**OPTIONS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()  # without gradients, as people do to start a scheduler
    try:
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    except ZeroGraphError as error:
        return str(error)
    weight = full_values(model)["0.weight"]
    gathered = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, weight)
    return "synchronized" if torch.equal(*gathered) else "the ranks drifted apart in silence"


def test_a_model_that_dynamo_skips_does_not_train_unsynchronized() -> None:
    for outcome in run(2, _never_compiled):
        assert outcome == "synchronized" or "hint:" in outcome, outcome


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.LazyLinear(3)


class Host(nn.Module):
    """A module that stays plain, and calls a compiled function."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(6, 6)
        self.loss = torch.compile(lambda x: x.square().mean(), backend=zerograph.backend(**OPTIONS))

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.own(x))


def _first_call(kind: type[nn.Module]) -> list[str]:
    model = kind()
    if kind is not Host:
        model.compile(backend=zerograph.backend(**OPTIONS))
    model(torch.ones(2, 6)).sum().backward()
    return [type(p).__name__ for p in model.parameters()]


@pytest.mark.parametrize(("kind", "spec"), [(Lazy, "DTensor"), (Host, "Parameter")])
def test_what_a_first_call_shards(kind: type[nn.Module], spec: str) -> None:
    for specs in run(2, _first_call, kind):
        assert set(specs) == {spec}


def _differentiated_twice() -> str:
    model = torch.compile(Net(), backend=zerograph.backend(**OPTIONS))
    loss = model(torch.ones(2, 6)).square().mean()
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    with pytest.raises(RuntimeError) as caught:
        (loss + sum(g.to_local().square().sum() for g in grads)).backward()
    return str(caught.value)


def test_gradients_of_gradients_are_refused() -> None:
    for message in run(2, _differentiated_twice):
        assert "twice" in message or "double backward" in message


# One process.


def _alone(group: bool, port: int) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if group:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    for stage, dtype in ((0, None), (3, None), (3, torch.bfloat16)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net()
        plain = copy.deepcopy(model)
        backend = zerograph.backend(stage=stage, dtype=dtype, compute="eager")
        compiled = torch.compile(model, backend=backend)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
        for _ in range(3):
            x = torch.randn(4, 6)
            with backend.no_sync():
                loss = compiled(x.to(dtype)).float().square().mean()
                loss.backward()
            expected = plain(x).square().mean()
            expected.backward()
            zerograph.clip_grad_norm_(model.parameters(), 1.0)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            torch.testing.assert_close(loss, expected, rtol=1e-5 if dtype is None else 2e-2, atol=1e-6)
        assert backend.report() and backend.plan and backend.program


def _tells(pipe: Connection, group: bool, port: int) -> None:
    try:
        _alone(group, port)
    except Exception:
        pipe.send(traceback.format_exc())
    else:
        pipe.send("fine")


@pytest.mark.parametrize("group", [False, True], ids=["no process group", "a group of one"])
def test_one_process(group: bool, free_port: int) -> None:
    """In a process that no launcher started."""
    ours, theirs = server().Pipe(duplex=False)
    process = server().Process(target=_tells, args=(theirs, group, free_port), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(170), "no answer"
    assert (answer := ours.recv()) == "fine", answer
    process.join(10)
    assert process.exitcode == 0


@pytest.fixture
def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# Several models of one class.


class Scaled(nn.Module):
    """Owns a parameter itself: Dynamo asks of tensors in modules of torch.nn alone whether two are one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.full((6,), 0.5)), nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.linear(x * self.scale) - y).square().mean()


def _functional() -> Callable[[nn.Module], Callable[..., Tensor]]:
    compiled = torch.compile(lambda m, x, y: m(x, y), backend=zerograph.backend(**OPTIONS))
    return lambda module: lambda x, y: compiled(module, x, y)


def _same_tensor_twice(form: str) -> list[float]:
    function = _functional()

    def made() -> Callable[..., Tensor]:
        torch.manual_seed(0)
        module = Scaled()
        if form == "function":
            return function(module)
        if form == "name":
            return torch.compile(module, backend="zerograph", options=OPTIONS)
        module.compile(backend=zerograph.backend(**OPTIONS))
        return module

    x = torch.randn(4, 6)
    first, second = made(), made()
    return [m(*args).item() for m, args in ((first, (x, x.clone())), (second, (x, x)), (first, (x, x)))]


@pytest.mark.parametrize("form", ["module", "name", "function"])
def test_a_second_model_may_get_one_tensor_twice(form: str) -> None:
    for losses in run(2, _same_tensor_twice, form):
        assert losses == pytest.approx([losses[0]] * 3)
