"""Triton kernels for what no compiler writes: one file each (tests/kernel_cases.py has references in plain torch).

Only what runs on a GPU imports them, after it has asked :func:`available`; importing this package imports no Triton.
``tables.py`` says how one launch works on a list of tensors.
"""

from __future__ import annotations

import functools
import importlib.util
import logging

import torch

log = logging.getLogger(__name__)

OLDEST = (3, 6)
"""The Triton that the oldest supported torch (2.11) names."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that the kernels read and write; they compute in float32 at least."""


def available(device: torch.device) -> bool:
    """Whether the kernels run on ``device``: a GPU with a Triton that is new enough.

    Elsewhere torch's own kernels do the work. On a GPU that is logged once, at level INFO.
    """
    return device.type == "cuda" and _installed()


@functools.cache
def _installed() -> bool:
    theirs = "torch's kernels update, sum, pack and encode on GPUs"
    if importlib.util.find_spec("triton") is None:
        log.info("Triton is not installed: %s (pip install triton)", theirs)
        return False
    import triton

    found = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if found < OLDEST:
        log.info("Triton %s is older than %s: %s", triton.__version__, ".".join(map(str, OLDEST)), theirs)
    return found >= OLDEST
