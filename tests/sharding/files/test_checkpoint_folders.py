"""Checkpoints on hosts that share no folder: each rank saves to a folder of its own, as one path is there; and what an
interrupted save leaves of an older one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run, warned
from torch import nn

import zerograph


def _saved(folders: list[str], how: str) -> list[str]:
    model = nn.Linear(4, 4)
    zerograph.shard(model, zerograph.backend())
    path = folders[dist.get_rank() % len(folders)]
    with warned() as messages:
        for number in range(2):
            state, where = {"model": model.state_dict()}, f"{path}/{number}"
            if how == "save":
                dcp.save(state, checkpoint_id=where)
            elif how == "async_save":
                dcp.async_save(state, checkpoint_id=where).result()
            else:
                dcp.save(model.state_dict(), storage_writer=dcp.HuggingFaceStorageWriter(where, save_distributed=True))
    return messages


def test_files_that_are_on_other_hosts_are_reported_at_each_save(tmp_path: Path) -> None:
    folders = [str(tmp_path / host) for host in ("one", "two")]
    for how in ("save", "async_save", "safetensors"):
        first, second = run(2, _saved, folders, how)
        assert second == [], "one line for each checkpoint, on the rank that writes the metadata"
        for number, messages in enumerate(first):
            assert messages.startswith(f"1 of the 2 files of the checkpoint in {folders[0]}/{number}, "), messages
            assert os.uname().nodename in messages and "hint: save to a folder that all hosts mount" in messages
        assert len(first) == 2


def test_a_folder_that_is_shared_is_not_reported(tmp_path: Path) -> None:
    for how in ("save", "async_save", "safetensors"):
        assert run(2, _saved, [str(tmp_path / how)], how) == [[], []]


class _Interrupted(dcp.FileSystemWriter):
    """Ends as rank 1 does that is killed when rank 0 has written."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        dist.barrier()
        if dist.get_rank() == 1:
            raise OSError("no room")
        return written


def _saved_over(path: str) -> list[bool]:
    model = nn.Linear(4, 4)
    zerograph.shard(model, zerograph.backend())
    dcp.save(model.state_dict(), checkpoint_id=path)
    found = [Path(path, ".metadata").exists()]
    with pytest.raises(dcp.api.CheckpointException):
        dcp.save(model.state_dict(), storage_writer=_Interrupted(path))
    found.append(Path(path, ".metadata").exists())
    dcp.save(model.state_dict(), checkpoint_id=path)
    return [*found, Path(path, ".metadata").exists()]


def test_an_interrupted_save_over_an_older_one_leaves_nothing_that_loads(tmp_path: Path) -> None:
    assert run(2, _saved_over, str(tmp_path)) == [[True, False, True]] * 2
