"""Every kernel compiled ahead of time for NVIDIA's and AMD's GPUs, which takes none: Triton brings the assemblers."""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install -e .[kernels]")

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
MOST_REGISTERS = {"_update": 64}
"""Of a thread, where a wrong size of blocks would first be seen; others have at most 128."""


class Variant(NamedTuple):
    """One kernel as it is launched.

    Attributes:
        kernel: which.
        signature: types of its arguments.
        constants: values of its compile-time arguments.
        warps: of a program.
        fused: whether a product and a sum may become one operation.
        vectors: whether threads are to move vectors: "ld" from memory, "st" to it, or neither.
        subnormal: whether subnormal numbers are no zeros.
    """

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int = 4
    fused: bool = True
    vectors: str = ""
    subnormal: bool = False


def _updates() -> Iterator[Variant]:
    import triton.language as tl

    from zerograph.runtime.kernels import adamw

    signature = {"columns": "*i64", "shared": "*fp64", "scalars": "*fp32", "count": "i32"}
    for maximize in (False, True):
        yield Variant(adamw._count, signature, {"MAXIMIZE": maximize, "BLOCK": 128}, fused=False)
    signature |= {"programs": "*i32"}
    signature |= dict.fromkeys(("weight", "beta2", "rest2", "eps", "weight_decay"), "fp32")
    dtypes = {"PARAM": tl.float32, "GRAD": tl.float32, "STATE": tl.float32, "COPY": None}
    plain = {"AMSGRAD": False, "COUPLED": False, "NEAR": True, "ALIGNED": True, "BLOCK": adamw.BLOCK}
    changes: list[dict[str, Any]] = [
        {},
        {"ALIGNED": False},
        {"GRAD": tl.bfloat16, "COPY": tl.bfloat16},
        {"GRAD": tl.float16, "COPY": tl.float16},
        {"GRAD": tl.bfloat16, "COPY": tl.bfloat16, "STATE": tl.bfloat16},
        {"PARAM": tl.bfloat16, "GRAD": tl.bfloat16, "STATE": tl.bfloat16},
        {"AMSGRAD": True, "COUPLED": True, "NEAR": False, "GRAD": tl.bfloat16, "COPY": tl.bfloat16},
    ]
    for change in changes:
        constants = dtypes | plain | change
        yield Variant(
            adamw._update, signature, constants, adamw.WARPS, fused=False, vectors="ld" * constants["ALIGNED"]
        )


def _sums() -> Iterator[Variant]:
    import triton.language as tl

    from zerograph.runtime.kernels import sum_of_squares as sums

    signature = {"columns": "*i64", "programs": "*i32", "partial": "*fp64", "count": "i32"}
    for dtype, aligned in itertools.product((tl.float32, tl.bfloat16, tl.float16), (False, True)):
        constants = {"DTYPE": dtype, "ALIGNED": aligned, "BLOCK": sums.BLOCK, "ROUNDS": sums.ROUNDS}
        yield Variant(sums._add_blocks, signature, constants, vectors="ld" * aligned)
    signature = {"partial": "*fp64", "total": "*fp64", "count": "i32"}
    yield Variant(sums._add_partial, signature, {"BLOCK": sums.BLOCK})


def _messages() -> Iterator[Variant]:
    import triton.language as tl

    from zerograph.runtime.kernels import messages

    for (dtype, out), aligned in itertools.product(
        itertools.product((tl.float32, tl.bfloat16), ("fp32", "bf16", "fp16")), (False, True)
    ):
        signature = {"columns": "*i64", "programs": "*i32", "message": f"*{out}", "count": "i32", "width": "i32"}
        constants = {"DTYPE": dtype, "ALIGNED": aligned, "BLOCK": messages.BLOCK}
        yield Variant(messages._pack, signature, constants, vectors="ld" * aligned)
    dtypes = (tl.float32, tl.bfloat16, tl.float16)
    for total, out, aligned in itertools.product(dtypes, dtypes, (False, True)):
        signature = {"columns": "*i64", "programs": "*i32", "count": "i32", "number": "fp32"}
        constants = {"SUM": total, "OUT": out, "ALIGNED": aligned, "BLOCK": messages.BLOCK}
        yield Variant(messages._divide, signature, constants, vectors="ld" * aligned, subnormal=True)


def _wires() -> Iterator[Variant]:
    import triton.language as tl

    from zerograph.core.step import WIRE_BLOCK, WIRE_MOST
    from zerograph.runtime.kernels import wires

    dtypes = {tl.float32: "fp32", tl.bfloat16: "bf16", tl.float16: "fp16"}
    integers = dict.fromkeys(("count", "payload", "scales_at", "stride", "width"), "i32")
    kinds = [*itertools.product(("fp8", "int8", "int4", "sign"), (tl.float32, tl.bfloat16), (True,))]
    kinds += [("int8", tl.float16, True), ("int8", tl.float32, False)]
    for wire, dtype, aligned in kinds:
        constants = {"DTYPE": dtype, "WIRE": wire, "MOST": WIRE_MOST.get(wire), "ALIGNED": aligned}
        constants |= {"BLOCKS": wires.BLOCKS, "BLOCK": WIRE_BLOCK}
        for kernel, elements, vectors in ((wires._encode, "values", "ld"), (wires._decode, "out", "st")):
            signature = {elements: f"*{dtypes[dtype]}", "message": "*u8", **integers}
            yield Variant(kernel, signature, constants, vectors=vectors * aligned, subnormal=True)
    integers = dict.fromkeys(("count", "payload", "scales_at", "width", "senders"), "i32")
    kinds = [*itertools.product(("bf16", "fp8", "int8", "int4", "sign"), (tl.float32, tl.bfloat16), (True,))]
    kinds += [("int8", tl.float16, True), ("int8", tl.float32, False)]
    for wire, dtype, aligned in kinds:
        constants = {"DTYPE": dtype, "WIRE": wire, "ALIGNED": aligned, "BLOCKS": wires.BLOCKS, "BLOCK": WIRE_BLOCK}
        signature = {"out": f"*{dtypes[dtype]}", "messages": "*u8", **integers, "scale": "fp32"}
        yield Variant(wires._add_up, signature, constants, fused=False, vectors="st" * aligned, subnormal=True)


GROUPS = {"update": _updates, "sums": _sums, "messages": _messages, "wires": _wires}


def _compile(variant: Variant, target: tuple[Any, ...]) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    divisible = [name for name, kind in variant.signature.items() if kind.startswith("*")]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source = ASTSource(variant.kernel, signature, variant.constants, aligned)
    options = {"num_warps": variant.warps, "enable_fp_fusion": variant.fused}
    return dict(triton.compile(source, target=GPUTarget(*target), options=options).asm)


def _assembled(ptx: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills, as ptxas says."""
    import triton

    (name,) = re.findall(r"\.target (\w+)", ptx)  # sm_90a for what is said to be sm_90
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={name}", str(file), "-o", f"{folder}/cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    assert len(spilled) == 2, said
    return int(registers), sum(map(int, spilled))


def _check(group: str, name: str) -> list[str]:
    lines = []
    for variant in GROUPS[group]():
        asm = _compile(variant, TARGETS[name])
        kernel = variant.kernel.__name__
        what = f"{kernel} {variant.constants} for {name}"
        if name.startswith("gfx"):
            assert asm["hsaco"][:4] == b"\x7fELF", what
            (spilled,) = re.findall(r"\.vgpr_spill_count:\s*(\d+)", asm["amdgcn"])
            assert int(spilled) == 0, f"{what} spills {spilled} registers"
            continue
        assert asm["cubin"][:4] == b"\x7fELF", what
        registers, spilled = _assembled(asm["ptx"])
        assert spilled == 0, f"{what} spills {spilled} bytes"
        assert registers <= MOST_REGISTERS.get(kernel, 128), f"{what} takes {registers} registers"
        assert variant.fused or "fma.rn.f32" not in re.sub(r"(?s)call.*?;", "", asm["ptx"]), f"{what} fuses"
        assert not variant.subnormal or ".ftz" not in asm["ptx"], f"{what} takes subnormal numbers for zeros"
        if variant.vectors:
            moved = rf"{variant.vectors}\.global\.(L\S+\.)?v[248]\."
            assert re.search(moved, asm["ptx"]), f"{what}: no {variant.vectors} of vectors"
        lines.append(f"{kernel} for {name}: {registers} registers, no spills, {variant.constants}")
    return lines


@pytest.mark.parametrize(
    "target", [pytest.param(name, marks=[pytest.mark.slow] * (name != "sm_90")) for name in TARGETS]
)
@pytest.mark.parametrize("group", GROUPS)
def test_kernels_compile_without_spills(compiled: Callable[..., Any], group: str, target: str) -> None:
    print(*compiled(_check, group, target), sep="\n")
