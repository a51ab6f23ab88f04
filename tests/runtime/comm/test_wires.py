"""Tests ``runtime/comm/wires.py`` and ``csrc/wire_target.cc``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run
from taken_hosts import on_two_hosts, opened

import zerograph._core as _core
from zerograph.core.layout import Layout
from zerograph.core.step import WIRE_BLOCK, Param, wire_bytes
from zerograph.runtime.buffers import torch_dtype
from zerograph.runtime.comm.collectives import together
from zerograph.runtime.comm.entry import Entry
from zerograph.runtime.comm.wires import (
    decode,
    decode_by_torch,
    encode,
    encode_by_torch,
    finish_gather,
    start_gather,
)

FEWER_BITS = ("fp8", "int8", "int4", "sign")
LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}


def _sent(wire: str, values: torch.Tensor, *, by_torch: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The message of ``values``, with one NaN for all of them, and what comes out of it in their dtype."""
    message = torch.full((len(values), wire_bytes(wire, values.shape[1])), 0xAB, dtype=torch.uint8)
    out = torch.empty_like(values)
    (encode_by_torch if by_torch else encode)(wire, values, message)
    (decode_by_torch if by_torch else decode)(wire, message, out)
    if wire in FEWER_BITS:
        scales = message[:, -4 * -(-values.shape[1] // WIRE_BLOCK) :].view(torch.float32)
        scales[scales.isnan()] = torch.nan
    return message, out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wire", FEWER_BITS)
@given(
    rows=st.integers(1, 3),
    elements=st.integers(1, 3 * WIRE_BLOCK + 5),
    power=st.integers(-30, 30),
    poison=st.sampled_from([None, None, float("nan"), float("inf"), float("-inf")]),
    seed=st.integers(0, 2**31),
)
def test_native_and_torchs_operators_write_the_same_bytes(
    wire: str, dtype: torch.dtype, rows: int, elements: int, power: int, poison: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    values = (torch.randn(rows, elements) * 2.0 ** (power if dtype != torch.float16 else power // 4)).to(dtype)
    if poison is not None:
        values[rows // 2, elements // 2] = poison
    message, out = _sent(wire, values)
    reference, expected = _sent(wire, values, by_torch=True)
    assert torch.equal(message, reference)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("wire", LARGEST)
def test_no_element_is_off_by_more_than_half_a_step_of_its_block(wire: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(2, 10 * WIRE_BLOCK) * torch.logspace(-6, 6, 10).repeat_interleave(WIRE_BLOCK)
    _, out = _sent(wire, values)
    blocks = values.double().view(-1, WIRE_BLOCK)
    scale = blocks.abs().amax(1, keepdim=True) / LARGEST[wire]
    # fp8 has three bits behind the first one: half of the last, or half a step of its smallest numbers.
    half = torch.maximum(blocks.abs() / 16, scale / 2**10) if wire == "fp8" else scale / 2
    assert ((out.double().view_as(blocks) - blocks).abs() <= half * (1 + 1e-5)).all()


def test_signs_have_the_mean_magnitude_of_their_block() -> None:
    torch.manual_seed(0)
    values = torch.randn(2, 2 * WIRE_BLOCK + 5)  # of the last block, which is short, all elements count
    _, out = _sent("sign", values)
    for own, came in zip(values.split(WIRE_BLOCK, 1), out.split(WIRE_BLOCK, 1), strict=True):
        torch.testing.assert_close(came, own.sign() * own.abs().mean(1, keepdim=True))


@pytest.mark.parametrize("wire", FEWER_BITS)
def test_a_block_with_what_is_no_number_is_none(wire: str) -> None:
    values = torch.ones(4, 3 * WIRE_BLOCK)
    values[0, 5], values[1, 300], values[2, 2 * WIRE_BLOCK] = float("nan"), float("inf"), float("-inf")
    for by_torch in (False, True):
        _, out = _sent(wire, values, by_torch=by_torch)
        broken = out.isnan().view(4, 3, WIRE_BLOCK)
        assert broken.all(2).nonzero().tolist() == [[0, 0], [1, 1], [2, 2]]
        assert broken.sum() == 3 * WIRE_BLOCK


@pytest.mark.parametrize("wire", FEWER_BITS)
def test_zeros_and_the_smallest_numbers_are_numbers(wire: str) -> None:
    values = torch.zeros(1, 2 * WIRE_BLOCK)
    values[0, 3] = 1e-45
    _, out = _sent(wire, values)
    assert torch.equal(out, torch.zeros_like(out))


def test_sixteen_bits_are_rounded_and_have_no_scales() -> None:
    values = torch.randn(3, 77)
    message, out = _sent("bf16", values)
    assert message.shape[1] == 2 * 77
    assert torch.equal(out, values.bfloat16().float())


@pytest.mark.parametrize("target", _core.kernel_targets()[1:])
@pytest.mark.parametrize("wire", FEWER_BITS)
def test_every_instruction_set_writes_the_same_bytes(wire: str, target: str) -> None:
    torch.manual_seed(1)
    values, kernel = torch.randn(1, 5 * WIRE_BLOCK + 7), getattr(_core.Wire, wire)
    values[0, 600] = float("inf")
    found = []
    for which in ("baseline", target):
        message = torch.empty(wire_bytes(wire, values.numel()), dtype=torch.uint8)
        out = torch.empty(values.numel(), dtype=torch.bfloat16)
        _core.encode(kernel, values.data_ptr(), _core.DType.float32, values.numel(), message.data_ptr(), which)
        _core.decode(kernel, message.data_ptr(), out.numel(), out.data_ptr(), _core.DType.bfloat16, which)
        found.append((message, out.view(torch.int16)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="float64 has no wire"):
        _core.encode(_core.Wire.int8, 0, _core.DType.float64, 0, 0)


WORLD = 4
ROWS, WHOLE = Layout("rows", WORLD), Layout("whole", WORLD)


def _bucket(gather: str, reduce: str) -> list[Param]:
    return [
        Param("weight", (37, 50), "float32", "float32", "float32", True, ROWS, (), gather, reduce),
        Param("bias", (9,), "float32", "float32", "float32", True, ROWS),
        Param("of 16 bits", (7, 3), "float32", "bfloat16", "float32", True, ROWS, (), gather, reduce),
        Param("a rank without rows", (6, 2), "float32", "float32", "bfloat16", True, ROWS, (), gather, reduce),
        Param("whole", (3, 111), "float32", "float32", "float32", True, WHOLE, (), None, reduce),
    ]


def _through(wire: str, flat: torch.Tensor) -> torch.Tensor:
    """What arrives of ``flat`` elements."""
    message = torch.empty(1, wire_bytes(wire, flat.numel()), dtype=torch.uint8)
    out = torch.empty_like(flat)
    encode(wire, flat.contiguous().unsqueeze(0), message)
    decode(wire, message, out.unsqueeze(0))
    return out


def _parts(param: Param, full: torch.Tensor) -> list[torch.Tensor]:
    """What each rank sums of a gradient, or has of a sharded parameter, padded to one length."""
    size = param.summed_elements
    return list(torch.nn.functional.pad(full.reshape(-1), (0, WORLD * size - param.elements)).split(size))


def _gathered(param: Param, full: torch.Tensor) -> torch.Tensor:
    full = full.to(torch_dtype(param.compute_dtype))
    if param.gather_wire is None:
        return full
    sent = [_through(param.gather_wire, part) for part in _parts(param, full)]
    return torch.cat(sent)[: param.elements].view(param.shape)


def _mean(param: Param, terms: list[torch.Tensor]) -> torch.Tensor:
    """The sum of what arrives of each term: of a host, or of a rank."""
    if param.reduce_wire is None:
        return torch.stack(terms).sum(0)
    sums = [
        torch.stack([_through(param.reduce_wire, term) for term in of_rank]).sum(0)
        for of_rank in zip(*(_parts(param, term) for term in terms), strict=True)
    ]
    if not param.sharded:
        # One with fewer elements behind its end has another last block only by zeros.
        sums = [_through(param.reduce_wire, part) for part in sums]
    return torch.cat(sums)[: param.elements].view(param.shape)


def _collectives(transport: str, gather: str, reduce: str) -> None:
    params, group = _bucket(gather, reduce), dist.group.WORLD
    assert group is not None
    with pytest.MonkeyPatch.context() as patch:
        if transport == "group":
            patch.setenv("ZEROGRAPH_TRANSPORT", "group")
        comm = on_two_hosts() if transport == "two levels" else opened()
    torch.manual_seed(0)
    full = [torch.randn(p.shape) for p in params]
    grads = [[torch.randn(p.shape) for p in params] for _ in range(WORLD)]
    with together(comm, Entry("test", 1, 0)):
        sharded = [p for p in params if p.sharded]
        shards = [value[p.shard_rows(comm.rank)] for p, value in zip(params, full, strict=True) if p.sharded]
        found = finish_gather(comm, start_gather(comm, sharded, shards))
        means = comm.finish_reduce(comm.start_reduce(params, grads[comm.rank]))
    # Messages are not kept alive by what came with them.
    assert len({each.untyped_storage().data_ptr() for each in found}) == 1
    for p, value, got in zip(sharded, full, found, strict=False):
        assert torch.equal(got, _gathered(p, value)), p.name
    for p, mean, *by_rank in zip(params, means, *grads, strict=True):
        terms = [grad / WORLD for grad in by_rank]
        if transport == "two levels":
            terms = [terms[0] + terms[1], terms[2] + terms[3]]
        lossless = replace(p, reduce_wire=None) if transport == "shared memory" else p
        expected = _mean(lossless, terms)
        expected = expected[p.shard_rows(comm.rank)] if p.sharded else expected
        # Host sums are divided when they are taken, so that the last bit of what is encoded may be another: one step.
        atol = 1e-6 if lossless.reduce_wire is None else 2.0 / LARGEST.get(reduce, 256.0)
        rough = "bfloat16" in (p.reduce_dtype, reduce)
        torch.testing.assert_close(mean, expected, rtol=0, atol=max(atol, 0.02 * rough), msg=p.name)
        exact = torch.stack(by_rank).mean(0)
        exact = exact[p.shard_rows(comm.rank)] if p.sharded else exact
        if exact.numel():
            assert (mean - exact).norm() <= {"bf16": 0.01, "int8": 0.02, "int4": 0.3}[reduce] * exact.norm(), p.name


@pytest.mark.parametrize("transport", ["two levels", "group", "shared memory"])
@pytest.mark.parametrize(("gather", "reduce"), [("int8", "int4"), ("fp8", "int8"), ("bf16", "bf16")])
def test_collectives_bring_what_the_wire_leaves(transport: str, gather: str, reduce: str) -> None:
    run(WORLD, _collectives, transport, gather, reduce)
