"""What having Triton changes where there is no GPU: nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install -e .[kernels]")

TRAINING = """
import importlib.abc, json, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

if sys.argv[1] == "blocked":
    sys.meta_path.insert(0, Blocked())
import torch
import zerograph
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)))
backend = zerograph.backend(stage=3)
compiled = torch.compile(model, backend=backend)
optimizer = zerograph.optim.AdamW(model.parameters(), lr=1e-2, moments=torch.bfloat16)
losses = []
for _ in range(4):
    loss = compiled(torch.ones(2, 8)).square().mean()
    loss.backward()
    optimizer.step(clip=1.0)
    optimizer.zero_grad()
    losses.append(loss.item().hex())
digests = [s.digest for p in backend.frames[-1].programs.values() for s in p.segments]
print(json.dumps({"triton": "triton" in sys.modules, "losses": losses, "digests": digests}))
"""


def _start(how: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / how), "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    command = [sys.executable, "-c", TRAINING, how]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=folder)


def _end(training: subprocess.Popen[str]) -> dict[str, Any]:
    out, said = training.communicate()
    assert training.returncode == 0, said
    return json.loads(out)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_segments_and_losses_are_the_same_with_and_without_it(tmp_path: Path) -> None:
    there, blocked = map(_end, [_start(how, tmp_path) for how in ("there", "blocked")])
    assert (there.pop("triton"), blocked.pop("triton")) == (True, False)  # Inductor imports what is there
    assert there == blocked
    assert len(there["losses"]) == 4 and there["digests"]
