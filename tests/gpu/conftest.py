"""GPU tests run on a machine with one GPU; elsewhere they skip and say so. Those of tiers run on any accelerator."""

from __future__ import annotations

import pytest
import torch

ANY = {"test_tiers.py"}
"""Files whose tests want an accelerator of whatever kind."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
            there = torch.accelerator.is_available() if item.path.name in ANY else torch.cuda.is_available()
            if not there:
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
