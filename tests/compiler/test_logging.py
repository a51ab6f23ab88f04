"""``TORCH_LOGS="+zerograph"`` shows what the passes did and the programs that came of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os
import sys

sys.path[:0] = {path!r}
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import zerograph

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


def train():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.ReLU())
    torch.compile(model, backend=zerograph.backend(stage=3, compute="eager"))(torch.ones(2, 4)).sum().backward()


train()
print("by default", file=sys.stderr, flush=True)
del os.environ["TORCH_LOGS"]
torch._logging.set_logs()
torch._dynamo.reset()
train()
"""


def test_torch_logs_shows_passes_and_programs() -> None:
    script = SCRIPT.format(path=[str(Path(__file__).parents[2])])
    environment = os.environ | {"TORCH_LOGS": "+zerograph"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    logged, default = done.stderr.split("by default\n")
    assert done.stdout == ""
    assert "stage 3: sharded 1 parameters over 2 ranks" in logged
    assert "pass gather: 1" in logged and "pass reduce: 1" in logged
    assert "frame 0 forward:" in logged and "WaitGather" in logged and "WaitReduce" in logged
    assert "zerograph" not in default
