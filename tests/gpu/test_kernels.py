"""The Triton kernels, compiled: the cases that are interpreted on a CPU (tests/runtime/kernels), on a GPU."""

from __future__ import annotations

import pytest
import torch
from kernel_names import NAMES

pytest.importorskip("triton", reason="Triton is not installed: pip install -e .[kernels]")


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_their_references(name: str) -> None:
    from kernel_cases import CASES

    CASES[name]("cuda")


def test_low_moments_on_a_device() -> None:
    """torch's fused kernels keep none."""
    from optim.training import assert_close, parameters

    import zerograph.optim as native

    ends = []
    for device in ("cpu", "cuda"):
        params = [torch.nn.Parameter(p.detach().to(device)) for p in parameters(torch.bfloat16)]
        optimizer = native.AdamW(params, lr=1e-3, master=torch.float32, moments=torch.bfloat16)
        for step in range(10):
            torch.manual_seed(step)
            for p in params:
                p.grad = torch.randn(p.shape).to(p)
            optimizer.step(clip=1.0)
        ends.append([optimizer.state[p]["master"].cpu() for p in params])
    assert_close(*ends, rtol=1e-5, atol=1e-6)
