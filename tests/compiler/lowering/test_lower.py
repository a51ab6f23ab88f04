"""From graphs to programs: which segments are shared, what crosses a cut, and when registers die."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from graphs import Builder, fake_world, plan
from torch import Tensor, nn

import zerograph
from zerograph.compiler.lowering.lower import lower
from zerograph.compiler.lowering.segments import SegmentCache
from zerograph.core.instructions import Accumulate, Compute, Gather
from zerograph.core.program import Program
from zerograph.graph.nodes import added
from zerograph.passes import gather, prefetch

aten = torch.ops.aten


class Layer(nn.Module):
    def __init__(self, width: int, scale: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.scale, self.dropout = scale, dropout
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * nn.functional.dropout(self.linear(self.norm(x)), self.dropout, self.dropout > 0)


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def four_ranks() -> Iterator[None]:
    with fake_world(rank=0, world_size=4):
        yield


def compiled(model: nn.Module, *lengths: int, **options: object) -> zerograph.Backend:
    """The backend of ``model`` after one training step per length of its input."""
    backend = zerograph.backend(**{"stage": 3, "compute": "eager", "bucket_size": 512, **options})
    model.compile(backend=backend)
    for length in lengths:
        model(torch.randn(2, length, 8)).sum().backward()
    return backend


def _segments(program: Program) -> list[int]:
    return [step.segment for step in program.instructions if isinstance(step, Compute)]


def test_repeated_layers_share_segments_so_depth_costs_nothing() -> None:
    counts = []
    for depth in (4, 8):
        backend = compiled(Stack(*(Layer(8) for _ in range(depth))), 4)
        counts.append({kind: len(program.segments) for kind, program in backend.program.items()})
        assert len(_segments(backend.program["forward"])) >= depth
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_layers_with_dropout_share_segments_too() -> None:
    backend = compiled(Stack(*(Layer(8, dropout=0.1) for _ in range(8))), 4)
    for program in backend.program.values():
        assert max(Counter(_segments(program)).values()) >= 4


def test_different_constants_are_different_segments() -> None:
    same = compiled(Stack(*(Layer(8, scale=2.0) for _ in range(6))), 4)
    other = compiled(Stack(*(Layer(8, scale=s) for s in (1.5, 2.0, 2.5, 3.0, 3.5, 4.0))), 4)
    assert len(same.program["forward"].segments) < len(other.program["forward"].segments)


def test_sequences_of_any_length_run_one_program() -> None:
    backend = compiled(Stack(Layer(8), Layer(8)), 4, 5, 6, 7, 9)
    assert [len(f.programs) for f in backend.frames] == [2, 2]  # of the first length, and of all others
    assert backend.report().runs == {"forward": 5, "backward": 5}


def test_symbolic_segments_belong_to_their_frame() -> None:
    """What Inductor assumed about one frame's sizes is guarded there, and nowhere else."""
    backend = zerograph.backend(stage=3, compute="eager")
    digests = []
    for _ in range(2):
        model = Stack(Layer(8))
        model.compile(backend=backend, dynamic=True)
        model(torch.randn(2, 4, 8)).sum().backward()
        digests.append({s.digest for s in backend.frames[-1].programs["forward"].segments})
    assert not digests[0] & digests[1]


def test_the_text_and_the_collectives_of_a_real_program() -> None:
    backend = compiled(Stack(Layer(8), Layer(8)), 4)
    forward = backend.program["forward"]
    assert "   0  Gather       layers.0" in str(forward).splitlines()
    assert next(forward.collectives()) == "gather bucket 0: layers.0.norm.weight [8] float32"
    assert forward.digest != backend.program["backward"].digest


def test_no_cut_separates_a_tuple_from_its_parts() -> None:
    """The second result is unpacked behind the cut of the next bucket."""
    b = Builder()
    x = b.input("x", 4, 4)
    u, v = b.params("u", "v")
    pair = b.call(aten.max.dim, b.mm(x, u), 0)
    values = b.call(operator.getitem, pair, 0)
    h = b.mm(b.mm(x, v), b.call(aten.diag.default, values))
    gm = b.output(h, b.call(operator.getitem, pair, 1))
    p = plan(gm, "u", "v")
    gather(gm, p)
    prefetch(gm, p)
    program, callables = lower(gm, "inference", SegmentCache("eager"), p)
    first = next(s for s in program.instructions if isinstance(s, Compute))
    results = callables[first.segment]([torch.eye(4), torch.eye(4)])
    assert all(isinstance(r, Tensor) for r in results)


def test_all_but_the_first_product_read_the_sum_that_they_are_added_to() -> None:
    b = Builder()
    x, w, like = b.input("x", 8, 4), b.input("w", 4, 16), b.input("like", 8, 16)
    first = added(b.graph, [x, w], None, like)
    gm = b.output(added(b.graph, [x, w], first, like))
    program, _ = lower(gm, "inference", SegmentCache("eager"), plan(gm))
    ends = [i for i in program.instructions if isinstance(i, Accumulate)]
    factors, made = (8 * 4 + 4 * 16) * 4, 8 * 16 * 4
    assert [(i.packed, i.moved) for i in ends] == [(factors, factors + made), (factors, factors + 2 * made)]


def test_tiles_are_summed_in_float32_at_least_and_whole_numbers_in_their_own() -> None:
    for dtype, summed in ((torch.bfloat16, "float32"), (torch.float64, "float64"), (torch.int64, "int64")):
        b = Builder()
        x = b.input("x", 4, dtype=dtype)
        gm = b.output(added(b.graph, [x], added(b.graph, [x], None, x), x))
        program, _ = lower(gm, "inference", SegmentCache("eager"), plan(gm))
        ends = [i for i in program.instructions if isinstance(i, Accumulate)]
        assert [i.dtype for i in ends] == [summed, summed]


def test_every_register_that_is_not_returned_dies_once() -> None:
    for program in compiled(Stack(Layer(8), Layer(8)), 4).program.values():
        dead = Counter(r for step in program.instructions for r in step.dead)
        assert set(dead.values()) == {1}
        unread = set(range(program.inputs)) - set(dead) - set(program.outputs)
        written = set(range(program.registers)) - unread
        assert written == set(dead) | {r for r in program.outputs if r is not None}


def test_gathered_parameters_are_not_saved_for_the_backward() -> None:
    """Nothing the forward returns is as large as a full weight: the shard is what is saved."""
    model = Stack(*(nn.Linear(64, 64) for _ in range(3)))
    saved: list[int] = []
    backend = zerograph.backend(stage=3, compute="eager", bucket_size=512)
    model.compile(backend=backend)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        model(torch.randn(2, 4, 64))
    assert saved and max(saved) <= 64 * 64 // 4


def test_a_slice_of_a_parameter_of_dynamic_length_is_not_saved() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.zeros(512, 8))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.positions[: x.shape[1]]).sin()

    backend = compiled(Positions(), 4, 5, 6)
    gathers = [sum(isinstance(s, Gather) for s in p.instructions) for p in backend.program.values()]
    assert gathers == [1, 1]


@pytest.mark.slow
def test_inductor_runs_the_same_program() -> None:
    """Dropout, whose seeds cross segments, and a dynamic length, in code compiled for inference."""
    torch.manual_seed(0)
    model = Stack(Layer(8, dropout=0.5), Layer(8, dropout=0.5), Layer(8, dropout=0.5))
    backend = zerograph.backend(stage=3, bucket_size=512)
    model.compile(backend=backend)
    with torch.no_grad():
        assert model(torch.randn(2, 4, 8)).shape == (2, 4, 8)
        assert model(torch.randn(2, 5, 8)).shape == (2, 5, 8)
    assert backend.report().runs == {"inference": 2}


class Asserting(nn.Module):
    """An assertion that nothing reads, before the first weight, and one inside of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Stack(*(Layer(8) for _ in range(2)))

    def forward(self, x: Tensor, limit: Tensor) -> Tensor:
        torch._assert_async((limit > 0).all(), "no limit")
        x = self.layers(x)
        torch._assert_async((x.detach().abs() < limit).all(), "above the limit")
        return x


@pytest.mark.parametrize(("recompute", "compute"), [("auto", "inductor"), ("full", "eager")])
def test_what_a_model_asserts_is_checked(recompute: str, compute: str) -> None:
    model = Asserting()
    model.compile(backend=zerograph.backend(stage=3, compute=compute, bucket_size=512, recompute=recompute))
    model(torch.ones(2, 8), torch.tensor(1e3)).sum().backward()
    for limit, message in ((0.0, "no limit"), (1e-3, "above the limit")):
        with pytest.raises(RuntimeError, match=message):
            model(torch.ones(2, 8), torch.tensor(limit))
