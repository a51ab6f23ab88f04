"""A rank is killed on one of two hosts, and torchrun starts all ranks again on both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import elastic_job
import pytest
import torch
from elastic_job import EVERY, KILLED, ROWS, STEPS
from host_ranks import PORT, Net, assert_left_nothing, assert_mean, torchrun, train


@pytest.mark.slow
@pytest.mark.timeout(600)  # it starts sixteen processes, which import torch
def test_all_ranks_start_again_and_go_on_from_the_last_checkpoint(hosts: list[Any], disks: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    expected = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), ROWS, range(STEPS))
    runs = []
    for number, host in enumerate(hosts[:2]):
        # torch would look up the names of the hosts, which no server knows.
        meets = f"--rdzv-backend c10d --rdzv-endpoint {hosts[0].address}:{PORT} --rdzv-conf is_host={int(not number)}"
        job = f"--nnodes 2 --nproc-per-node 2 --max-restarts 1 --local-addr {host.address} {meets}"
        runs.append(torchrun(host, *job.split(), elastic_job.__file__, str(disks)))
    told = [run.communicate(timeout=280)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], told
    for first, steps in ((0, slice(KILLED)), (EVERY, slice(EVERY, STEPS))):
        found = [json.loads((disks / f"rank {rank} from {first}.json").read_text()) for rank in range(4)]
        assert_mean(found, expected[steps], rtol=1e-5)
    assert_left_nothing(hosts[:2], disks)
