"""Private names of Inductor: segments and kernels compile with them on the installed torch."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from zerograph.compiler.lowering import torch_private
from zerograph.compiler.torch_private import Uncacheable

aten = torch.ops.aten


def _squares() -> Callable[[list[Any]], Sequence[Any]]:
    with torch_private.FakeTensorMode():
        fake = torch.ones(2, 2)
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(aten.mm.default, (x, x))
    x.meta["val"], product.meta["val"] = fake, fake
    graph.output((product,))
    return torch_private.compile_segment(fx.GraphModule({}, graph))


def test_segments_are_compiled_and_stored() -> None:
    compiled = _squares()
    loaded = torch_private.loaded_segment(pickle.loads(pickle.dumps(torch_private.stored_segment(compiled))))
    for run in (compiled, loaded):
        (result,) = run([torch.full((2, 2), 3.0)])
        assert result.tolist() == [[18, 18], [18, 18]]
    with pytest.raises(Uncacheable):
        torch_private.stored_segment(lambda args: args)


@pytest.fixture
def products() -> Iterator[Sequence[Any]]:
    """Where torch says how float32 products are computed: everywhere, on CUDA, on CPUs; none is set around a test."""
    backends: Any = torch.backends
    settings = (backends, backends.cuda.matmul, backends.mkldnn.matmul)

    def unset() -> None:
        for setting in settings:
            setting.fp32_precision = "none"

    unset()
    yield settings
    torch.set_float32_matmul_precision("highest")  # it sets the newer ones, too
    unset()


def test_kernels_are_written_by_either_setting_of_float32_products(products: Sequence[Any]) -> None:
    found = {torch_private.kernel_settings()}
    for setting, precision in zip(products, ("tf32", "tf32", "bf16"), strict=True):
        setting.fp32_precision = precision
        found.add(torch_private.kernel_settings())
        setting.fp32_precision = "none"
    torch.set_float32_matmul_precision("medium")
    found.add(torch_private.kernel_settings())
    assert len(found) == 5


def test_segments_are_no_cuda_graphs() -> None:
    """Whose outputs the next replay would write over; a CPU's are counted as skipped where they are asked for."""
    before = counters["inductor"]["cudagraph_skips"]
    with inductor_config.patch({"triton.cudagraphs": True}):
        torch_private.loaded_segment(torch_private.stored_segment(_squares()))
    assert counters["inductor"]["cudagraph_skips"] == before


def test_kernels_are_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[dict[str, Any]] = []
    monkeypatch.setattr(torch_private.AsyncCompile, "wait", lambda _, scope: waited.append(scope))
    compiler, scope = torch_private.AsyncCompile(), {"kernel": "to come"}
    with torch_private.kernels_in_background():
        compiler.wait(scope)
        assert not waited
    assert waited == [scope]
    compiler.wait(scope)
    assert len(waited) == 2


class _Set:
    """An instruction set that is so wide and passes its check or not."""

    checked: list[str] = []

    def __init__(self, name: str, width: int, valid: bool) -> None:
        self.name, self.width, self.valid = name, width, valid

    def __str__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        self.checked.append(self.name)
        return self.valid

    def bit_width(self) -> int:
        return self.width


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Inductor's own list stays")
@pytest.mark.parametrize(
    ("width", "capability", "picked", "checks"),
    [
        (None, None, "b", "ab"),
        (256, None, "c", "abc"),
        (None, "avx2", "avx2 d", ["a", "b", "c", "avx2 d"]),
        (1024, None, "INVALID_VEC_ISA", ["a", "b", "c", "avx2 d"]),
    ],
)
def test_instruction_sets_are_checked_until_one_fits(
    monkeypatch: pytest.MonkeyPatch, width: int | None, capability: str | None, picked: str, checks: Sequence[str]
) -> None:
    isa = torch_private.cpu_vec_isa
    sets = [_Set("a", 512, False), _Set("b", 512, True), _Set("c", 256, True), _Set("avx2 d", 128, True)]
    monkeypatch.setattr(isa, "valid_vec_isa_list", None)  # puts the real one back
    monkeypatch.setattr(isa, "x86_isa_checker", lambda: ["a", "b", "c", "d", "avx2"])
    monkeypatch.setattr(isa, "supported_vec_isa_list", [*sets, _Set("e", 512, True)])
    monkeypatch.setattr(_Set, "checked", [])
    if capability is not None:
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
    torch_private._check_when_read()
    with torch._inductor.config.patch({"cpp.simdlen": width}):
        assert str(isa.pick_vec_isa()) == picked
    assert list(dict.fromkeys(_Set.checked)) == [*checks]


def test_instruction_sets_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = torch_private.cpu_vec_isa
    own = _valid_sets()
    monkeypatch.setattr(isa, "valid_vec_isa_list", _valid_sets)
    torch_private._check_when_read()
    assert [*isa.valid_vec_isa_list()] == [*own]


def test_instruction_sets_have_names() -> None:
    assert " at 0x" not in torch_private.vector_instructions()


_valid_sets = torch_private.cpu_vec_isa.valid_vec_isa_list  # before any test has prepared for kernels


def test_kernels_find_what_was_prepared() -> None:
    """The header's command line is that of kernels: a segment with one precompiles no other."""
    torch_private.prepare_kernels().result()
    headers = torch._inductor.codecache._precompile_header.cache_info()
    assert headers.currsize
    with torch_private.FakeTensorMode():
        fake = torch.ones(31, 7)
    graph = fx.Graph()
    x = graph.placeholder("x")
    sine = graph.call_function(aten.sin.default, (x,))
    x.meta["val"], sine.meta["val"] = fake, fake
    graph.output((sine,))
    (result,) = torch_private.compile_segment(fx.GraphModule({}, graph))([torch.zeros(31, 7)])
    assert not result.any()
    assert torch._inductor.codecache._precompile_header.cache_info().misses == headers.misses
