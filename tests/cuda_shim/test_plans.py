"""``zerograph plan`` traces the operators of a GPU where torch finds one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cuda_shim.process import with_shim

pytestmark = pytest.mark.costly


def test_attention_with_dropout_stores_no_scores_on_a_gpu(shim: Path) -> None:
    """GPT-2 has it. Attention of the others is fused on a CPU, too, where saved sums have another size."""
    found = json.loads(with_shim(shim, "plans.py", "gpt2", "llama", "vit").splitlines()[-1])
    peak = {name: {device: bytes for device, (bytes, _) in of.items()} for name, of in found.items()}
    assert peak["gpt2"]["cuda"] < 0.85 * peak["gpt2"]["cpu"]
    for name in ("llama", "vit"):
        assert peak[name]["cuda"] == pytest.approx(peak[name]["cpu"], rel=1e-3)
