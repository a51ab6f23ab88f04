"""Where kernels replace others: updates, norms, messages and wires are those without them, to the bit.

Kernels are interpreted, and what lies on the CPU counts as lying on a GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install -e .[kernels]")


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    import torch

    from zerograph.runtime import kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "available", lambda device: True)
        for module in ("tensors", "parts", "states", "factor"):
            patch.setattr(f"zerograph.optim.{module}.uses_kernels", lambda local: False)
        patch.setattr("zerograph.optim.algorithms.adam.adam", None)  # torch's, which is not to be called
        patch.setattr(torch, "_foreach_norm", None)
        yield


def _trained(cls: Any, options: dict[str, Any], dtype: Any, step: dict[str, Any]) -> list[Any]:
    import torch
    from optim.training import parameters, train

    params = parameters(dtype)
    optimizer = cls(params, **options)
    train(optimizer, 10, **step)
    states = [value for p in params for value in optimizer.state[p].values() if isinstance(value, torch.Tensor)]
    return [*params, *states]


def _updates(name: str) -> None:
    import torch
    from optim.training import PAIRS, assert_close

    import zerograph.optim as native

    cases = {name: (ours, options, torch.float32) for name, (ours, _, options) in PAIRS.items()}
    masters = {"lr": 1e-3, "master": torch.float32}
    cases |= {
        "masters": (native.AdamW, masters, torch.bfloat16),
        "masters of float16": (native.AdamW, masters, torch.float16),
        "low moments": (native.AdamW, {"lr": 1e-3, "moments": torch.bfloat16}, torch.float32),
        "low moments of masters": (native.Adam, masters | {"moments": torch.bfloat16}, torch.bfloat16),
    }
    cls, options, dtype = cases[name]
    for step in ({}, {"grad_scale": 8.0, "clip": 1.0}):
        there = _trained(cls, options, dtype, step)
        with _as_on_a_gpu():
            here = _trained(cls, options, dtype, step)
        assert_close(here, there, 0, 0)


UPDATES = [
    *("adam", "adam decay", "adam amsgrad maximize", "adam tensor lr", "adamw", "adamw amsgrad"),
    *("masters", "masters of float16", "low moments", "low moments of masters"),
]


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_is_that_of_the_host(interpreted: Callable[..., Any], name: str) -> None:
    interpreted(_updates, name)


def _skips() -> None:
    from optim.training import assert_close, give_gradients, parameters

    import zerograph.optim as native

    ends = []
    for context in (contextlib.nullcontext(), _as_on_a_gpu()):
        params = parameters()
        optimizer = native.AdamW(params, lr=0.1)
        with context:
            for step in range(5):
                give_gradients(params, step)
                if step == 2:
                    params[1].grad[3] = float("nan")
                optimizer.step(clip=1.0)
        assert optimizer.skipped == 1
        ends.append([*params, *(optimizer.state[p]["step"] for p in params)])
    assert_close(*ends, 0, 0)
    assert float(ends[0][-1]) == 4


def test_a_step_that_a_gpu_skips_is_that_of_the_host(interpreted: Callable[..., Any]) -> None:
    interpreted(_skips)


def _norms() -> None:
    import torch
    from optim.training import give_gradients, parameters

    from zerograph.optim.clip import clip_grad_norm_

    params = parameters()
    for poison in (None, float("nan"), float("inf")):
        found = []
        for context in (contextlib.nullcontext(), _as_on_a_gpu()):
            give_gradients(params, 0)
            params[0].grad = params[0].grad.t().contiguous().t()
            if poison is not None:
                params[1].grad[3] = poison
            with context:
                found.append(clip_grad_norm_(params, 1.0))
        torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


def test_a_norm_is_that_of_the_host(interpreted: Callable[..., Any]) -> None:
    interpreted(_norms)


def _packed(world: int) -> None:
    import torch

    from zerograph.core.layout import Layout
    from zerograph.core.step import Param
    from zerograph.runtime.comm.packing import gradient_message, padded_shards

    cpu = torch.device("cpu")
    params = [
        Param("even", (8, 16), "float32", "float32", "float32", True, Layout("rows", world)),
        Param("uneven", (5,), "float32", "float32", "float32", True, Layout("rows", world)),
        Param("cast", (7, 33), "float32", "bfloat16", "float32", True, Layout("rows", world)),
        Param("cast too", (64, 65), "float32", "bfloat16", "float32", True, Layout("rows", world)),
        Param("one row", (1, 2), "float32", "float16", "float32", True, Layout("rows", world)),
        Param("double", (3, 3), "float64", "float64", "float64", True, Layout("rows", world)),
    ]
    full = [torch.randn(p.shape).to(getattr(torch, p.dtype)) for p in params]
    grads = [torch.randn(p.shape).to(getattr(torch, p.compute_dtype)) for p in params[:-1]]
    grads[2] = grads[2].t().contiguous().t()
    for rank in range(world):
        shards = [value[p.shard_rows(rank)] for p, value in zip(params, full, strict=True)]
        there = padded_shards(params, shards, cpu)
        with _as_on_a_gpu():
            here = padded_shards(params, shards, cpu)
        torch.testing.assert_close(here, there, rtol=0, atol=0)
        assert all(send.is_contiguous() for send in here)
    whole = [replace(p, home=Layout("whole", world)) for p in params]
    for dtype, reduced in itertools.product((torch.float32, torch.bfloat16), (params, whole)):
        there_message = gradient_message(reduced[:-1], grads, dtype, cpu)
        with _as_on_a_gpu():
            here_message = gradient_message(reduced[:-1], grads, dtype, cpu)
        torch.testing.assert_close(here_message, there_message, rtol=0, atol=0)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_messages_are_those_of_torch(interpreted: Callable[..., Any], world: int) -> None:
    interpreted(_packed, world)


def _meant(dtype: str) -> None:
    import torch

    from zerograph.runtime.comm.packing import means
    from zerograph.runtime.kernels import messages

    sums = list(torch.randn(5000).to(getattr(torch, dtype)).split([77, 3000, 0, 1923]))
    for out in (torch.float32, torch.bfloat16, torch.float16):
        there, launches = means(sums, 3, [out] * 4), []
        with _as_on_a_gpu(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(messages, "_divide", _Counted(messages._divide, launches))
            here = means(sums, 3, [out] * 4)
        assert len(launches) == 1
        torch.testing.assert_close(here, there, rtol=0, atol=0)
        assert len({mean.untyped_storage().data_ptr() for mean in here if mean.numel()}) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_launch_divides_and_casts_all_sums(interpreted: Callable[..., Any], dtype: str) -> None:
    """To the bits of torch's two operators."""
    interpreted(_meant, dtype)


def _wired(wire: str) -> None:
    import torch

    from zerograph.core.step import wire_bytes
    from zerograph.runtime.comm import wires
    from zerograph.runtime.kernels import wires as triton_kernels

    values, launches = torch.randn(2, 777), []
    there, out = torch.zeros(2, wire_bytes(wire, 777), dtype=torch.uint8), torch.empty(2, 777)
    wires.encode(wire, values, there)
    wires.decode(wire, there, out)
    with _as_on_a_gpu(), pytest.MonkeyPatch.context() as patch:
        for name in ("encode", "decode"):
            kernel = getattr(triton_kernels, f"_{name}")
            patch.setattr(triton_kernels, f"_{name}", _Counted(kernel, launches))
        here, found = torch.zeros_like(there), torch.empty_like(out)
        wires.encode(wire, values, here)
        wires.decode(wire, here, found)
    assert len(launches) == 2
    assert torch.equal(here, there) and torch.equal(found, out)


class _Counted:
    """A kernel whose launches are counted."""

    def __init__(self, kernel: Any, launches: list[Any]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        self.launches.append(grid)
        return self.kernel[grid]


@pytest.mark.parametrize("wire", ["fp8", "int8", "int4", "sign"])
def test_one_launch_encodes_a_matrix_and_one_decodes_it(interpreted: Callable[..., Any], wire: str) -> None:
    """To the bits of the native kernels."""
    interpreted(_wired, wire)


def _summed(wire: str) -> None:
    import torch

    from zerograph.core.layout import Layout
    from zerograph.core.step import Param
    from zerograph.runtime.comm.wires import Terms
    from zerograph.runtime.kernels import wires as triton_kernels

    single, rows, launches = "float32", Layout("rows", 3), []
    params = [
        Param("even", (6, 300), single, single, single, True, rows, reduce_wire=wire),
        Param("fewer rows", (5, 111), "bfloat16", "bfloat16", single, True, rows, reduce_wire=wire),
    ]
    terms = Terms(params)
    messages = terms.messages(3, torch.device("cpu"))
    for which, param in enumerate(params):
        terms.write(messages, which, torch.randn(3, param.summed_elements))
    for rank in (0, 2):
        there = terms.sums(messages, rank, 1 / 3)
        with _as_on_a_gpu(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_kernels, "_add_up", _Counted(triton_kernels._add_up, launches))
            here = terms.sums(messages, rank, 1 / 3)
        torch.testing.assert_close(here, there, rtol=0, atol=0)
    assert len(launches) == 4


@pytest.mark.parametrize("wire", ["bf16", "int8", "int4", "sign"])
def test_one_launch_adds_up_the_terms_of_a_matrix(interpreted: Callable[..., Any], wire: str) -> None:
    """Of all senders, to the bits of the native kernels and of torch's sums."""
    interpreted(_summed, wire)


def _tables() -> None:
    import torch

    from zerograph.runtime.kernels.tables import table

    cpu = torch.device("cpu")
    first, again = (table([[16, 32], [0, 48]], [[3, 4]], [shared], cpu) for shared in (1.0, 2.0))
    assert first.columns is again.columns and first.aligned
    assert (first.shared.tolist(), again.shared.tolist()) == ([1.0], [2.0])
    assert first.columns.tolist() == [[16, 32], [0, 48], [3, 4]]
    other = table([[16, 24], [0, 48]], [[3, 4]], [1.0], cpu)
    assert not other.aligned and other.columns[0].tolist() == [16, 24]
    assert table([[16], [0]], [[3]], [], cpu).shared.numel() == 0


def test_tables_are_sent_once_for_the_same_addresses(interpreted: Callable[..., Any]) -> None:
    """And the numbers that change from step to step each time."""
    interpreted(_tables)


def _availability() -> list[bool]:
    import torch

    from zerograph.runtime import kernels

    return [kernels.available(torch.device("cpu")), kernels.available(torch.device("cuda"))]


def test_kernels_run_on_gpus(compiled: Callable[..., Any]) -> None:
    assert compiled(_availability) == [False, True]


OTHERS = {"missing": "", "old": "__version__ = '3.4.0'"}


@pytest.mark.parametrize("which", OTHERS)
def test_a_triton_that_is_missing_or_too_old_is_reported_once(which: str, tmp_path: Path) -> None:
    """Real interpreters, before whose own Triton stands another one, or none."""
    code = """
import importlib.util, logging, sys
which, folder = sys.argv[1:]
if which == "old":
    sys.path.insert(0, folder)
else:
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name == "triton" else find(name, package)
import torch
from zerograph.core.layout import Layout
from zerograph.runtime import kernels
logging.basicConfig(level=logging.INFO, format="%(message)s")
print([kernels.available(torch.device("cuda")) for _ in range(2)])
"""
    tmp_path.joinpath("triton.py").write_text(OTHERS[which])
    command = [sys.executable, "-c", code, which, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout == "[False, False]\n"
    said = {"missing": "Triton is not installed", "old": "Triton 3.4.0 is older than 3.6"}[which]
    assert (
        found.stderr.count(said) == 1
        and found.stderr.count("torch's kernels update, sum, pack and encode on GPUs") == 1
    )
