"""A process in which Triton interprets kernels: its import decides between that and compiling, once for a process."""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

InProcess = Callable[..., Any]


def _begin(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    if environment["TRITON_INTERPRET"] == "1":
        _round_as_gpus_do()


def _round_as_gpus_do() -> None:
    """Triton's interpreter cuts off what bfloat16 has no digits for, and widens its subnormal numbers to others; GPUs
    round to the nearest even number, and keep these."""
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    theirs = InterpreterBuilder.cast_impl

    def cast(self: Any, source: Any, dtype: Any) -> Any:
        if (source.dtype.scalar, dtype.scalar) == (tl.bfloat16, tl.float32):
            return TensorHandle((source.data.astype("uint32") << 16).view("float32"), tl.float32)
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return theirs(self, source, dtype)
        rounded = torch.from_numpy(source.data).bfloat16().view(torch.int16)
        return TensorHandle(rounded.numpy().view("uint16"), tl.bfloat16)

    for name in ("cast_impl", "create_fp_trunc", "create_fp_ext"):
        setattr(InterpreterBuilder, name, cast)


def _process(environment: dict[str, str]) -> Iterator[InProcess]:
    with ProcessPoolExecutor(1, mp.get_context("spawn"), _begin, (environment,)) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


@pytest.fixture(scope="session")
def interpreted() -> Iterator[InProcess]:
    """Calls a function in a process in which kernels are interpreted."""
    yield from _process({"TRITON_INTERPRET": "1"})


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """Calls a function in a process in which kernels are compiled, into a cache of their own."""
    yield from _process({"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))})
