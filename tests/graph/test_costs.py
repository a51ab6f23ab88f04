"""What nodes cost, counted by hand: products, bytes that kernels move, memory that a segment holds of its own."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from graphs import Builder
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from zerograph.graph import costs

aten = torch.ops.aten


def test_bytes_are_those_of_all_tensors() -> None:
    assert costs.bytes_of(torch.empty(3, 4, dtype=torch.bfloat16)) == 24
    assert costs.bytes_of((torch.empty(2), [torch.empty(0), torch.empty((), dtype=torch.float64)], None)) == 16
    assert costs.bytes_of(7) == costs.bytes_of(None) == 0


def test_an_open_size_counts_as_it_was_traced() -> None:
    gm = make_fx(lambda x: x.relu(), tracing_mode="symbolic")(torch.ones(6, 5))
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.relu.default)
    assert isinstance(node.meta["val"].numel(), torch.SymInt) and costs.bytes_of(node.meta["val"]) == 120


def test_products_have_flops_and_nothing_else_has() -> None:
    b = Builder()
    x, bias = b.input("x", 8, 4), b.input("bias", 5)
    w = b.input("w", 4, 5)
    assert costs.flops_of(b.mm(x, w)) == 2 * 8 * 4 * 5
    assert costs.flops_of(b.call(aten.addmm.default, bias, x, w)) == 2 * 8 * 4 * 5
    image, kernel = b.input("image", 2, 3, 8, 8), b.input("kernel", 6, 3, 3, 3)
    convolution = b.call(aten.convolution.default, image, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert costs.flops_of(convolution) == 2 * (2 * 6 * 6 * 6) * (3 * 3 * 3)
    assert costs.flops_of(b.call(aten.relu.default, x)) == costs.flops_of(x) == 0


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_two_products_and_its_gradient_five(causal: bool) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return list(torch.autograd.grad(out.sum(), (q, k, v)))

    batch, heads, rows, columns, width = 2, 3, 16, 16, 8
    q = torch.zeros(batch, heads, rows, width, requires_grad=True)
    k, v = (torch.zeros(batch, heads, columns, width, requires_grad=True) for _ in range(2))
    gm = make_fx(loss)(q, k, v)
    found = [flops for node in gm.graph.nodes if (flops := costs.flops_of(node))]
    product = 2 * batch * heads * rows * columns * width
    assert found == [2 * product, 5 * product]
    assert all(costs.attention_flops(node) == costs.flops_of(node) for node in gm.graph.nodes)


def test_products_are_no_attention() -> None:
    b = Builder()
    product = b.mm(b.input("x", 8, 4), b.input("w", 4, 5))
    assert costs.flops_of(product) and not costs.attention_flops(product)


def test_memory_belongs_to_what_made_it() -> None:
    b = Builder()
    x = b.input("x", 4, 6)
    parts = b.call(aten.split.Tensor, x, 2)
    part = b.call(aten.t.default, b.call(operator.getitem, parts, 1))
    both = b.call(aten.var_mean.correction, x)
    mean = b.call(operator.getitem, both, 1)
    assert costs.memory_owner(part) is x
    assert costs.memory_owner(mean) is mean, "each result of a kernel has memory of its own"


def chain() -> tuple[fx.Node, ...]:
    """``x`` through a product, two operators that fuse, and a sum."""
    b = Builder()
    x, w = b.input("x", 8, 4), b.input("w", 4, 16)
    product = b.mm(x, w)
    act = b.call(aten.relu.default, product)
    double = b.call(aten.add.Tensor, act, act)
    total = b.call(aten.sum.default, double)
    return x, w, product, act, double, total


def test_a_segment_moves_what_its_kernels_do_and_fused_inputs_once() -> None:
    _, w, product, act, double, total = chain()
    given, weight, made = 8 * 4 * 4, 4 * 16 * 4, 8 * 16 * 4
    assert costs.kernel_bytes(product) == given + weight + made
    assert costs.kernel_bytes(product, without=(w,)) == given + made
    assert costs.kernel_bytes(act) == 0
    assert costs.moved_bytes([act, double], [double]) == 2 * made
    assert costs.moved_bytes([product, act], [act]) == given + weight + 3 * made, "written, read, written"
    assert costs.moved_bytes([act, double, total], [total]) == made + (made + 4), "a sum is a kernel"


def test_products_pack_both_matrices() -> None:
    x, w, product, act, *_ = chain()
    assert costs.packed_bytes(product) == costs.bytes_of([x.meta["val"], w.meta["val"]])
    assert costs.packed_bytes(act) == 0
    b = Builder()
    both = b.call(aten.addmm.default, b.input("bias", 16), b.input("x", 8, 4), b.input("w", 4, 16))
    assert costs.packed_bytes(both) == costs.packed_bytes(product)


def test_what_a_product_reads_is_written_before() -> None:
    b = Builder()
    x, w = b.input("x", 8, 8), b.input("w", 8, 8)
    act = b.call(aten.relu.default, x)
    product = b.mm(b.call(aten.t.default, act), w)
    assert costs.moved_bytes([act, product], [product]) == 2 * 256 + 3 * 256
    both = b.call(aten.var_mean.correction, act)
    mean = b.call(operator.getitem, both, 1)
    low = b.call(aten.sub.Tensor, act, mean)
    reduced = costs.kernel_bytes(both)
    assert costs.moved_bytes([act, both, mean, low], [low, mean]) == reduced + 256 + 4 + 256, "sums fuse"


def test_experts_are_products_of_each_row_with_one_weight() -> None:
    pytest.importorskip("transformers.integrations.moe")  # registers the operators
    b = Builder()
    rows, weights = b.input("rows", 64, 8), b.input("weights", 4, 8, 16)
    found = b.call(
        torch.ops.transformers.grouped_mm_fallback.default, rows, weights, b.input("ends", 4, dtype=torch.int32)
    )
    assert costs.flops_of(found) == 2 * 64 * 8 * 16
    assert costs.kernel_bytes(found) == 4 * (64 * 8 + 4 * 8 * 16 + 4 + 64 * 16), "nothing fuses into it"


def test_a_convolution_lays_out_what_it_touches() -> None:
    b = Builder()
    image, kernel = b.input("image", 2, 3, 8, 8), b.input("kernel", 6, 3, 3, 3)
    convolution = b.call(aten.convolution.default, image, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert costs.kernel_bytes(convolution) == 3 * 4 * (2 * 3 * 64 + 6 * 27 + 2 * 6 * 36)


def test_a_segment_holds_products_until_their_last_reader() -> None:
    _, _, product, act, double, total = chain()
    made = 8 * 16 * 4
    assert costs.memory_inside([product, act, double], [double]).extra() == 0, "written over the product"
    assert costs.memory_inside([product, act, double, total], [total]).extra() == made - 4 + 4
    assert costs.memory_inside([product, act], [product]).extra() == 0, "what is handed on is not of its own"
    b = Builder()
    a = b.input("a", 8, 8)
    first = b.mm(a, a)
    second = b.mm(first, a)
    third = b.mm(second, a)
    assert costs.memory_inside([first, second, third], [third]).extra() == 256, "two at a time"
    assert costs.memory_inside([], []).extra() == 0


def test_what_a_segment_is_given_is_reported_by_position() -> None:
    b = Builder()
    a, w = b.input("a", 8, 8), b.input("w", 8, 8)
    seen = b.call(aten.view.default, a, [8, 8])
    first = b.mm(seen, w)
    second = b.mm(first, w)
    found = costs.memory_inside([seen, first, second], [second], [w, a])
    assert found.until == {0: 1, 1: 0}, "a is read last by the first product, as a view of it"
    assert found.extra([(1, 256)]) == 0 and found.extra([(0, 256), (1, 256)]) == 0
    assert found.levels == (256, 512)


def test_a_scatter_is_there_whole_and_is_not_written_over() -> None:
    b = Builder()
    table, rows, more = b.input("table", 8, 4), b.input("rows", 2, 4), b.input("more", 8, 4)
    at = b.call(aten.arange.default, 2)
    scattered = b.call(aten.index_put.default, table, [at], rows, True)
    total = b.call(aten.add.Tensor, scattered, more)
    assert costs.memory_inside([at, scattered, total], [total]).extra() == 8 * 4 * 4


def test_what_is_cheap_to_compute_again() -> None:
    _, _, product, act, double, _ = chain()
    assert costs.is_cheap_to_repeat(act) and costs.is_cheap_to_repeat(double)
    assert not costs.is_cheap_to_repeat(product)
    b = Builder()
    wide = b.input("wide", 64, 8)
    assert costs.is_cheap_to_repeat(b.call(aten.t.default, wide))
    row = b.call(aten.select.int, wide, 0, 0)
    narrow = b.call(aten.amax.default, wide, [1])
    assert costs.is_cheap_to_repeat(row), "a view"
    assert not costs.is_cheap_to_repeat(narrow), "an eighth of what it reads is rather saved"


def test_arithmetic_on_sizes_is_recognized_from_work() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x / (torch.scalar_tensor(x.shape[-1]) * 2.0) + x.sum() * 3.0

    gm = make_fx(scaled, tracing_mode="symbolic")(torch.ones(6, 5))
    found = [n.target for n in gm.graph.nodes if n in costs.describing_sizes(gm.graph)]
    assert found == [aten.sym_size.int, aten.scalar_tensor.default, aten.mul.Tensor]
    assert costs.describing_sizes(make_fx(lambda x: x.relu())(torch.ones(2)).graph) == set()
