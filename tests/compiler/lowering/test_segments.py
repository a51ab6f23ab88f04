"""Segments are compiled once for each structure, and uncompiled ones draw the same numbers from the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import torch
from graphs import Builder
from torch import fx
from torch._inductor import config as inductor_config

from zerograph.compiler.lowering import segments
from zerograph.compiler.lowering.segment_graph import Body, body_of
from zerograph.compiler.lowering.segments import Callee, SegmentCache, interpret

aten, prims = torch.ops.aten, torch.ops.prims
CPU = torch.device("cpu")


def body(*ops: torch._ops.OpOverload) -> Body:
    b = Builder()
    node = b.input("x", 4)
    for op in ops:
        node = b.call(op, node)
    gm = b.output(node)
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    return body_of(gm, nodes, nodes[-1:], {})


def get(cache: SegmentCache, *ops: torch._ops.OpOverload) -> Callee:
    found = body(*ops)
    return cache.get(found, found.digest())


def test_each_structure_is_compiled_once() -> None:
    cache = SegmentCache("eager")
    first, again = get(cache, aten.sin.default, aten.neg.default), get(cache, aten.sin.default, aten.neg.default)
    other = get(cache, aten.neg.default, aten.sin.default)
    assert first is again is not other
    assert (cache.requested, len(cache.callables)) == (3, 2)


def plus(constant: torch.Tensor) -> Body:
    """What adds a constant, which has the same name in each graph."""
    graph = fx.Graph()
    x, table = graph.placeholder("x"), graph.get_attr("table")
    node = graph.call_function(aten.add.Tensor, (x, table))
    for each in graph.nodes:
        each.meta["val"] = constant
    graph.output((node,))
    return body_of(fx.GraphModule({"table": constant}, graph), [node], [node], {})


def test_segments_with_other_constants_are_others() -> None:
    cache = SegmentCache("eager")
    runs = [cache.get(made, made.digest()) for made in (plus(torch.ones(4)), plus(torch.zeros(4)))]
    assert [run([torch.zeros(4)])[0].tolist() for run in runs] == [[1] * 4, [0] * 4]


def test_a_segment_takes_its_inputs_out_of_the_list() -> None:
    """So that nothing but the caller keeps them alive."""
    run, args = SegmentCache("eager").get(made := body(aten.sin.default), made.digest()), [torch.ones(4)]
    (out,) = run(args)
    assert torch.equal(out, torch.ones(4).sin()) and args == []


def test_what_was_compiled_in_a_block_that_failed_is_forgotten() -> None:
    cache = SegmentCache("eager")
    get(cache, aten.sin.default)

    def fails() -> None:
        get(cache, aten.cos.default)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), cache.kernels_in_background():
        fails()
    assert len(cache.callables) == 1
    with cache.kernels_in_background():
        get(cache, aten.cos.default)
    assert len(cache.callables) == 2


def test_settings_of_torch_have_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread more writes other kernels, and atomic additions are none that is deterministic."""
    compiled: list[object] = []
    monkeypatch.setattr(segments, "compile_segment", lambda gm: compiled.append(gm) or len(compiled))
    cache, made = SegmentCache("inductor"), body(aten.sin.default)

    def frame() -> object:
        with cache.kernels_in_background():
            return cache.get(made, made.digest())

    assert [frame(), frame()] == [1, 1]
    torch.use_deterministic_algorithms(True)
    try:
        assert [frame(), frame()] == [2, 2]
    finally:
        torch.use_deterministic_algorithms(False)
    with inductor_config.patch({"fallback_random": True}):
        assert frame() == 3


@pytest.mark.parametrize(
    ("compute", "device", "prepares"), [("eager", "cpu", 0), ("inductor", "cuda", 0), ("inductor", "cpu", 1)]
)
def test_only_kernels_of_a_cpu_are_prepared_for(
    monkeypatch: pytest.MonkeyPatch, compute: str, device: str, prepares: int
) -> None:
    calls: list[Future[None]] = []
    monkeypatch.setattr(segments, "prepare_kernels", lambda: calls.append(Future()))
    SegmentCache(compute).prepare(torch.device(device))
    assert len(calls) == prepares


def test_cuda_graphs_that_segments_do_not_become_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    for device in ("cpu", "cuda"):
        with inductor_config.patch({"triton.cudagraphs": True}):
            SegmentCache("inductor").prepare(torch.device(device))
    SegmentCache("inductor").prepare(torch.device("cuda"))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("torch._inductor.config.triton.cudagraphs is on")


def test_what_could_not_be_prepared_is_for_the_first_kernel_to_say(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed: Future[None] = Future()
    failed.set_exception(OSError("no compiler"))
    monkeypatch.setattr(segments, "prepare_kernels", lambda: failed)
    cache = SegmentCache("inductor")
    cache.prepare(CPU)
    with caplog.at_level("DEBUG", "zerograph"):
        run = get(cache, aten.sin.default)
        get(cache, aten.cos.default)
    assert run([torch.zeros(4)])[0].tolist() == [0, 0, 0, 0]
    assert caplog.text.count("could not prepare") == caplog.text.count("OSError: no compiler") == 1


def drawn(target: torch._ops.OpOverload, before: Sequence[object], after: Sequence[object]) -> list[torch.Tensor]:
    """Two draws from each of two seeds."""
    graph = fx.Graph()
    seed = graph.placeholder("seed")
    graph.output([graph.call_function(target, (*before, seed, *after)) for _ in range(2)])
    run = interpret(fx.GraphModule({}, graph))
    return [value for number in (1, 2) for value in run([torch.tensor(number)])]


@pytest.mark.parametrize(
    ("target", "before", "after"),
    [
        (prims.inductor_random.default, [[100]], ["rand"]),
        (prims.inductor_random.default, [[100]], ["randn"]),
        (prims.inductor_randint.default, [0, 7, [100]], []),
    ],
)
def test_random_numbers_follow_from_their_seed(
    target: torch._ops.OpOverload, before: Sequence[object], after: Sequence[object]
) -> None:
    """Torch's own operators ignore it when they run uncompiled: the backward would draw another mask."""
    torch.manual_seed(0)
    state = torch.get_rng_state()
    a, again, b, _ = drawn(target, before, after)
    assert torch.equal(a, again) and not torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), state), "the user's generator is left alone"
    if after == ["rand"]:
        assert a.min() >= 0 and a.max() < 1
    elif after == ["randn"]:
        assert a.min() < 0 and a.abs().max() < 6
    else:
        assert set(a.tolist()) == set(range(7))
