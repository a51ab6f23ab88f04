"""What the forward computes for the backward stands where its inputs are made."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import Builder, fake_world, plan, run, show
from torch import Tensor, fx, nn

import zerograph
from zerograph.graph.nodes import Pair
from zerograph.passes import gather, hoist, prefetch, verify

aten = torch.ops.aten


def _late(node: fx.Node) -> fx.Node:
    node.meta["partitioner_tag"] = "is_backward"
    return node


def test_golden_graph() -> None:
    """Two layers, and what their backward wants of them; the second wish reads the first one."""
    b = Builder()
    first = b.call(aten.exp.default, b.input("x", 4))
    second = b.call(aten.sin.default, first)
    negative = b.call(aten.neg.default, second)
    half = _late(b.call(aten.div.Tensor, first, 2))
    both = _late(b.call(aten.mul.Tensor, half, first))
    cosine, tangent = (_late(b.call(target, second)) for target in (aten.cos.default, aten.tan.default))
    gm = b.output(negative, half, both, cosine, tangent)
    before, _ = run(gm)
    assert hoist(Pair(gm, gm, 0)) == 4
    assert_expected_inline(
        show(gm),
        """\
exp_default = exp(x)
div_tensor = div(exp_default, 2)
mul_tensor = mul(div_tensor, exp_default)
sin_default = sin(exp_default)
cos_default = cos(sin_default)
tan_default = tan(sin_default)
neg_default = neg(sin_default)
return [neg_default, div_tensor, mul_tensor, cos_default, tan_default]""",
    )
    for a, b_ in zip(before, run(gm)[0], strict=True):
        assert torch.equal(a, b_)
    assert hoist(Pair(gm, gm, 0)) == 0


def test_nothing_comes_before_an_input_of_the_graph() -> None:
    """Gathers are put before the first operator, and read shards."""
    b = Builder()
    x = b.input("x", 4, 4)
    (weight,) = b.params("weight")
    product = b.mm(x, weight)
    gm = b.output(product, _late(b.call(aten.le.Scalar, x, 0)))
    assert hoist(Pair(gm, gm, 0)) == 1
    planned = plan(gm, "weight")
    for rewrite in (gather, prefetch, verify):
        rewrite(gm, planned)
    gm.graph.lint()
    assert [n.op for n in gm.graph.nodes][:2] == ["placeholder"] * 2


def test_a_model_that_begins_with_what_the_backward_wants_compiles() -> None:
    """The backward of a clamp wants to know where the input was within its bounds, which takes less than the input."""
    with fake_world(rank=0, world_size=2):
        model = nn.Sequential(nn.Hardtanh(), nn.Linear(8, 8))
        model.compile(backend=zerograph.backend(stage=3, compute="eager"))
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()


def test_the_forward_itself_stays() -> None:
    b = Builder()
    x = b.input("x", 4)
    one, two = b.call(aten.exp.default, x), b.call(aten.sin.default, x)
    gm = b.output(one, two, b.call(aten.cos.default, one))
    before = show(gm)
    assert hoist(Pair(gm, gm, 0)) == 0
    assert show(gm) == before


@pytest.mark.parametrize("target", [aten.bernoulli.default, aten.relu_.default], ids=["draws", "overwrites"])
def test_what_is_not_pure_stays(target: torch._ops.OpOverload) -> None:
    b = Builder()
    first = b.call(aten.exp.default, b.input("x", 4))
    second = b.call(aten.sin.default, first)
    gm = b.output(second, _late(b.call(target, first)))
    before = show(gm)
    assert hoist(Pair(gm, gm, 0)) == 0
    assert show(gm) == before


def test_what_reads_an_input_that_is_overwritten_stays() -> None:
    """Also through a view; the partitioner may have put the reading behind the writing."""
    b = Builder()
    counter, x = b.input("counter", 4), b.input("x", 4)
    view = b.call(aten.view.default, counter, [2, 2])
    written = b.call(aten.copy_.default, counter, x)
    seen, through = (_late(b.call(aten.neg.default, n)) for n in (counter, view))
    gm = b.output(written, seen, through)
    before = show(gm)
    assert hoist(Pair(gm, gm, 0)) == 0
    assert show(gm) == before


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).relu()


@pytest.mark.costly
@pytest.mark.parametrize("recompute", ["auto", "none"])
def test_no_segment_of_the_forward_grows_with_depth(recompute: str) -> None:
    """The norms' backward wants a quotient of every layer, which the forward computes."""
    longest = []
    for depth in (9, 12):
        with fake_world(rank=0, world_size=2):
            model = nn.Sequential(*(_Block() for _ in range(depth)))
            backend = zerograph.backend(stage=3, compute="eager", recompute=recompute)
            model.compile(backend=backend)
            model(torch.randn(2, 8)).sum().backward()
        longest.append([s.operators for s in backend.frames[0].programs["forward"].segments])
    assert max(longest[0]) == max(longest[1])
