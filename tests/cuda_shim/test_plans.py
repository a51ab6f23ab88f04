"""``zerograph plan`` traces the operators of a GPU where torch finds one."""

from __future__ import annotations

import pytest
from cuda_shim.process import Server

pytestmark = pytest.mark.costly


def test_attention_with_dropout_stores_no_scores_on_a_gpu(server: Server) -> None:
    """GPT-2 has it. Attention of the others is fused on a CPU, too, where saved sums have another size."""
    found = server.run("plans", "gpt2", "llama", "vit")
    peak = {name: {device: bytes for device, (bytes, _) in of.items()} for name, of in found.items()}
    assert peak["gpt2"]["cuda"] < 0.85 * peak["gpt2"]["cpu"]
    for name in ("llama", "vit"):
        assert peak[name]["cuda"] == pytest.approx(peak[name]["cpu"], rel=1e-3)
