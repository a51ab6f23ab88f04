"""Segments for GPUs are generated and assembled on a machine without one, for models of transformers.

A process with `shim.cc` loaded compiles a training step: Inductor writes Triton kernels, Triton and ptxas assemble them
for a real architecture. Nothing runs, and nothing is timed: of several configurations each is assembled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_shim.process import Server

pytestmark = [
    pytest.mark.costly,
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="kernels are counted for torch 2.13"),
]


@dataclass(frozen=True)
class Expected:
    """The calls of a step's distinct segments, in the order in which they are compiled.

    Attributes:
        kernels: Triton's, by segment.
        products: calls of libraries.
        operators: torch's own, which Inductor leaves to it.
    """

    kernels: list[int]
    products: list[int]
    operators: set[str]


@dataclass(frozen=True)
class SegmentCase:
    """A step of a model for a GPU, and the options that change none of its segments."""

    model: str
    capability: tuple[int, int]
    expected: Expected
    options: dict[str, Any] = field(default_factory=dict)
    alike: tuple[dict[str, Any], ...] = ({"stage": 1}, {"stage": 3, "offload": "parameters", "tier": "host"})


def made(server: Server, caches: Path, case: SegmentCase) -> dict[str, Any]:
    """The findings of `segments.py`."""
    caches_of = {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton")}
    found: dict[str, Any] = server.run("segments", case.model, case.capability, case.options, case.alike, **caches_of)
    return found


A100, H100 = (8, 0), (9, 0)
FLASH = {"_scaled_dot_product_flash_attention.default", "_scaled_dot_product_flash_attention_backward.default"}
MASKED = {"_scaled_dot_product_efficient_attention.default", "_scaled_dot_product_efficient_attention_backward.default"}
CASES = {
    "ViT on an A100": SegmentCase(
        "vit",
        A100,
        Expected(
            [1, 3, 4, 3, 1, 3, 11, 11, 3],
            [0, 1, 6, 1, 0, 2, 12, 12, 0],
            FLASH | {"convolution_backward.default"},
        ),
    ),
    "ViT in parts of the batch": SegmentCase(
        "vit",
        A100,
        Expected(
            [1, 3, 4, 3, 1, 3, 2, 11, 17, 16, 3],
            [0, 1, 6, 1, 0, 2, 0, 11, 0, 0, 0],
            FLASH | {"convolution_backward.default"},
        ),
        {"batch_tiles": 2},
    ),
    "ViT in parts of the batch, saved": SegmentCase(
        "vit",
        A100,
        Expected(
            [1, 3, 4, 0, 4, 0, 5, 1, 3, 1, 4, 4, 8, 6, 6, 11, 3],
            [0, 1, 6, 0, 6, 0, 1, 0, 2, 0, 2, 2, 0, 4, 4, 0, 0],
            FLASH | {"convolution_backward.default"},
        ),
        {"batch_tiles": 2, "recompute": "none"},
    ),
    "Llama": SegmentCase(
        "llama",
        H100,
        Expected(
            [6, 6, 5, 4, 1, 3, 6, 6, 7, 3],
            [0, 7, 7, 1, 1, 1, 8, 7, 13, 0],
            MASKED,
        ),
    ),
    "Llama with its MLPs in tiles": SegmentCase(
        "llama",
        H100,
        Expected(
            [6, 4, 0, 1, 1, 0, 1, 3, 4, 1, 3, 0, 1, 1, 1, 1, 1, 1, 1, 2, 1, 4, 6, 1, 6, 3],
            [0, 4, 1, 0, 0, 1, 0, 4, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 2, 6, 0, 8, 0],
            MASKED,
        ),
        {"tile": {"*mlp*": 2}},
        (),  # other stages have no tiles, and what leaves the device is cut otherwise
    ),
    "GPT-2 with dropout": SegmentCase(
        "gpt2",
        H100,
        Expected(
            [11, 5, 4, 1, 3, 1, 1, 4, 16, 16, 6],
            [0, 4, 4, 0, 1, 1, 1, 0, 8, 8, 0],
            MASKED,
        ),
    ),
    "T5": SegmentCase(
        "t5",
        H100,
        Expected(
            [1, 7, 4, 3, 9, 5, 1, 2, 2, 1, 3, 12, 17, 8, 9, 3],
            [0, 6, 6, 0, 10, 10, 0, 1, 1, 1, 0, 20, 20, 12, 12, 0],
            MASKED,
        ),
        alike=(),  # digests tell its constants apart by identity
    ),
    "Mixtral": SegmentCase(
        "mixtral",
        H100,
        Expected(
            [6, 11, 9, 4, 2, 4, 30, 15, 3],
            [0, 7, 7, 1, 0, 2, 15, 13, 0],
            MASKED | {"topk.default", "histc.default"},
        ),
    ),
}
"""Between the first layer and the last, layers share a segment in the forward and one in the backward."""


@pytest.mark.parametrize("name", CASES)
def test_every_segment_is_assembled_and_spills_nothing(name: str, server: Server, tmp_path: Path) -> None:
    case = CASES[name]
    found = made(server, tmp_path, case)
    kernels = {kernel for segment in found["segments"] for kernel in segment["triton"]}
    assert kernels == found["spilled"].keys() and not any(found["spilled"].values()), found["spilled"]
    assert found["alike"]
    assert [len(segment["triton"]) for segment in found["segments"]] == case.expected.kernels
    assert [len(segment["products"]) for segment in found["segments"]] == case.expected.products
    assert {name for segment in found["segments"] for name in segment["operators"]} == case.expected.operators
