"""Private names of torch that compiling needs: there, and of use, on the installed torch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from zerograph.compiler import torch_private
from zerograph.dryrun.torch_private import simulate_group

aten = torch.ops.aten


@pytest.fixture
def simulated() -> Iterator[None]:
    simulate_group(0, 2)
    yield
    dist.destroy_process_group()


# Dynamo


def _while_compiling(action: Callable[[fx.GraphModule, Sequence[Any]], Any]) -> Any:
    """What ``action`` returns while a function that sums sines is compiled as a graph with a backward."""
    torch.compiler.reset()
    found: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(action(gm, inputs))
        return gm

    def sum_of_sines(x: Tensor) -> Tensor:
        return x.sin().sum()

    torch.compile(sum_of_sines, backend=backend)(torch.ones(3, requires_grad=True))
    return found[0]


def test_what_dynamo_traces() -> None:
    assert _while_compiling(lambda *_: torch_private.traced_code()).co_name == "sum_of_sines"


def test_graph_breaks_are_counted() -> None:
    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    before = sum(torch_private.graph_breaks().values())
    torch.compile(broken, backend="eager")(torch.ones(2))
    assert sum(torch_private.graph_breaks().values()) == before + 1


# Fake tensors


def test_fake_tensors() -> None:
    def action(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
        mode = torch_private.fake_mode_of()
        assert mode is not None
        with mode:
            inside = torch.ones(2)
            with torch_private.outside_fake_mode():
                outside = torch.ones(2)
        assert torch_private.fake_mode_of([inside]) is mode
        made = torch_private.fake_as(inside, torch.empty(5, device="meta"))
        return [torch_private.is_fake(value) for value in (inside, made, outside)] + [made.device.type, *made.shape]

    assert _while_compiling(action) == [True, True, False, "cpu", 5]


# AOTAutograd


def _traced(
    gm: fx.GraphModule, inputs: Sequence[Any], partition: Callable[..., Any] | None = None
) -> tuple[Callable[..., Any], list[fx.GraphModule]]:
    """``gm`` as AOTAutograd makes it, with graphs that are run as they are; and the joint graphs that it split."""
    joints: list[fx.GraphModule] = []

    def split(joint: fx.GraphModule, given: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        joints.append(joint)
        return torch_private.split_by_minimum_cut(joint, given, num_fwd_outputs, [])

    def compile_(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(args: list[Any]) -> Any:
            return graph(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    traced = torch_private.trace_and_split(
        gm, inputs, forward=compile_, backward=compile_, inference=compile_, partition=split
    )
    return traced, joints


def _gradient(run: Callable[..., Any]) -> list[float]:
    x = torch.ones(3, requires_grad=True)
    run(x)[0].backward()
    assert x.grad is not None
    return x.grad.tolist()  # type: ignore[no-any-return]


def test_a_graph_is_traced_and_split() -> None:
    traced, joints = _while_compiling(_traced)
    assert len(joints) == 1
    assert _gradient(traced) == pytest.approx([math.cos(1)] * 3)


def test_a_trace_has_operators_as_inductor_decomposes_them() -> None:
    """Passes know views, casts and softmax in the form in which Inductor decomposes them, and in no other."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        traced, joints = _traced(gm, inputs)
        for joint in joints:
            with torch_private.as_when_called(joint):
                torch_private.simplify_joint(joint)
        found.extend(joints)
        return traced

    def loss(x: Tensor) -> Tensor:
        y = x.flip(0).roll(1, 0).t().to(torch.float64).reshape(-1, 2)
        z = torch.stack([y.to(torch.float32), y.float() @ x[:2]]).transpose(0, 1).reshape(-1, 4)
        return (z.softmax(-1) * 3).sum() + z.log_softmax(-1)[0, 0]

    torch.compile(loss, backend=backend)(torch.ones(4, 2, requires_grad=True)).backward()
    targets = {node.target for node in found[0].graph.nodes}
    assert {aten.permute.default, torch.ops.prims.convert_element_type.default, torch.ops.prims.fma.default} <= targets
    assert targets.isdisjoint({
        aten.flip.default, aten.roll.default, aten.t.default, aten._to_copy.default, aten._unsafe_view.default,
        aten.reshape.default, aten._softmax.default, aten._log_softmax.default, aten._softmax_backward_data.default,
        aten._log_softmax_backward_data.default,
    })  # fmt: skip


def test_a_joint_graph_is_worked_on_as_where_it_was_traced() -> None:
    _, (joint,) = _while_compiling(_traced)
    mode = torch_private.fake_mode_of([node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")])
    assert torch_private.fake_mode_of() is None and torch.is_grad_enabled()
    with torch_private.as_when_called(joint):
        assert torch_private.fake_mode_of() is mode is not None
        assert not torch.is_grad_enabled()


def test_a_trace_that_is_given_is_taken() -> None:
    def action(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with torch_private.separate_context():
            _, (joint,) = _traced(gm, inputs)
        for node in joint.graph.find_nodes(op="call_function", target=aten.cos.default):
            node.target = aten.neg.default
        joint.recompile()
        asked: list[int] = []
        with torch_private.trace_given(joint, lambda given: asked.append(len(given)) or True):  # type: ignore[func-returns-value]
            traced, (taken,) = _traced(gm, inputs)
        assert asked == [2] and taken is joint  # the input, and the gradient of the output
        return traced

    assert _gradient(_while_compiling(action)) == [-1, -1, -1]


def test_what_the_forward_saves_is_kept() -> None:
    def donated(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[list[int], list[int]]:
        context = torch._guards.TracingContext.get()
        context.fw_metadata = type("Metadata", (), {"bw_donated_idxs": [1, 2]})()
        before = list(context.fw_metadata.bw_donated_idxs)
        torch_private.keep_saved_tensors()
        return before, list(context.fw_metadata.bw_donated_idxs)

    assert _while_compiling(donated) == ([1, 2], [])


def test_graphs_generate_no_python_until_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    generated: list[object] = []
    code = fx.Graph.python_code
    monkeypatch.setattr(fx.Graph, "python_code", lambda *a, **k: generated.append(a[0]) or code(*a, **k))
    graph = fx.Graph()
    graph.output(graph.call_function(aten.neg.default, (graph.placeholder("x"),)))
    lazy = torch_private.lazily_coded({}, graph)
    lazy.recompile()
    assert not generated
    assert lazy(torch.ones(1)).item() == -1 and generated


# Frames on disk


def _wrapped_again(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """``gm`` from its programs and what was noted of AOTAutograd, without AOTAutograd."""
    programs: dict[str, Callable[..., Any]] = {}

    def compiles(kind: str) -> Callable[..., Any]:
        def compile_(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
            def run(args: list[Any]) -> Any:
                return graph(*args)

            run._boxed_call = True  # type: ignore[attr-defined]
            programs[kind] = run
            return run

        return compile_

    def split(joint: fx.GraphModule, given: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        return torch_private.split_by_minimum_cut(joint, given, num_fwd_outputs, [])

    noted: list[Any] = []
    with torch_private.noting_wrappers(noted):
        torch_private.trace_and_split(
            gm, inputs, forward=compiles("forward"), backward=compiles("backward"), inference=compiles("inference"),
            partition=split,
        )  # fmt: skip
    (wrappers,) = noted
    assert isinstance(wrappers, bytes)
    return torch_private.with_wrappers(wrappers, programs)


def test_programs_are_called_as_aotautograd_calls_them() -> None:
    assert _gradient(_while_compiling(_wrapped_again)) == pytest.approx([math.cos(1)] * 3)
    with torch.no_grad():
        (total,) = _while_compiling(_wrapped_again)(torch.ones(3))
    assert total.item() == pytest.approx(3 * math.sin(1))


def test_keys_tell_graphs_apart() -> None:
    def keys(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[str]:
        found = [torch_private.graph_key(gm, inputs) for _ in range(2)]
        next(iter(gm.graph.find_nodes(op="call_method", target="sin"))).target = "cos"
        gm.recompile()
        found.append(torch_private.graph_key(gm, inputs))
        with inductor_config.patch({"fx_graph_cache": False}), pytest.raises(torch_private.Uncacheable):
            torch_private.graph_key(gm, inputs)
        return found

    first, again, other = _while_compiling(keys)
    assert first == again != other


def test_facts_of_inputs() -> None:
    x = torch.arange(6.0).view(2, 3)
    facts = torch_private.facts_of_input
    assert facts(x) == facts(x.view(2, 3)) != facts(x.clone())
    assert facts(x)[:-1] == facts(x.clone())[:-1]
    for other in (x.t(), x[1:], x.double(), x.clone().requires_grad_(), nn.Parameter(x)):
        assert facts(other)[:-1] != facts(x)[:-1]
    for what in (3, x.to_sparse()):
        with pytest.raises(torch_private.Uncacheable):
            facts(what)


def test_libraries_of_operators() -> None:
    targets = (aten.neg.default, aten.neg, torch.ops.zg_test.keep.default, torch.sin, "sin")
    assert [torch_private.namespace_of(target) for target in targets] == ["aten", "aten", "zg_test", "", ""]


_FOLDERS = """
from torch import compiler
from torch._functorch import config
from torch._inductor.utils import fresh_inductor_cache
from zerograph.compiler.torch_private import frame_folder

print(frame_folder())
with fresh_inductor_cache():
    print(frame_folder())
with compiler.config.patch(force_disable_caches=True):
    print(frame_folder())
with config.patch(enable_autograd_cache=False):
    print(frame_folder())
"""


@pytest.mark.slow
def test_torchs_settings_say_where_frames_are_stored(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_AUTOGRAD_CACHE"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    ran = subprocess.run([sys.executable, "-c", _FOLDERS], env=environment, capture_output=True, text=True, check=True)
    own, fresh, forbidden, off = ran.stdout.split()
    assert own == str(tmp_path / "zerograph")
    assert fresh.endswith("/zerograph") and fresh != own
    assert (forbidden, off) == ("None", "None")


# DTensor


def test_local_tensors_are_wrapped_like_another_one(simulated: None) -> None:
    mesh = init_device_mesh("cpu", (2,))
    shard = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False, shape=(3, 4), stride=(4, 1))
    other = torch_private.ShardOf(shard).wrap(torch.zeros(2, 4))
    assert (other.shape, other.placements, other.device_mesh) == (shard.shape, shard.placements, mesh)
    assert not other.requires_grad


# Inductor


@torch.library.custom_op("zg_test::keep", mutates_args=())
def _keep(x: Tensor) -> Tensor:
    return x.clone()


@_keep.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_constants_are_folded_but_not_what_must_run() -> None:
    def left(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[str]:
        mode = torch_private.fake_mode_of()
        assert mode is not None
        graph = fx.Graph()
        with mode:
            ones = graph.call_function(aten.full.default, ([3], 1.0), {"pin_memory": False})
            ones.meta["val"] = torch.full([3], 1.0)
            out = []
            for operator in (aten.neg.default, torch.ops.zg_test.keep.default):
                out.append(graph.call_function(operator, (ones,)))
                out[-1].meta["val"] = torch.full([3], 1.0)
        graph.output(tuple(out))
        joint = fx.GraphModule({}, graph)
        torch_private.simplify_joint(joint)
        return [str(node.target) for node in joint.graph.nodes if node.op == "call_function"]

    torch_private.never_constant_fold(torch.ops.zg_test.keep.default)
    names = _while_compiling(left)
    assert "zg_test.keep.default" in names and "aten.neg.default" not in names
