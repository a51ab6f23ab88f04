"""Checkpoints that the ranks of two hosts write, and that others read on as many hosts as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from host_ranks import Net, assert_mean, own_disk, run_on, train, two_of_each
from ranks import warned
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import zerograph

ROWS, SAVED, STEPS = 12, 3, 6  # as many rows for each of two, three and four ranks
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
READ = ("shards", "whole", "exported")


def _sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model, backend = Net(), zerograph.backend(stage=3, compute="eager")
    zerograph.shard(model, backend)
    model.compile(backend=backend)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _saves(folder: Path) -> tuple[list[float], list[str]]:
    """Losses, and what is said of a checkpoint on disks of the hosts' own."""
    model, optimizer = _sharded(seed=0)
    losses = train(model, optimizer, ROWS, range(SAVED))
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.save(state, checkpoint_id=folder / "shards")
    whole = get_state_dict(model, optimizer, options=WHOLE)
    if dist.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")
    zerograph.export(model, folder / "exported.safetensors")
    with warned() as said:
        dcp.save(state, checkpoint_id=own_disk(folder) / "shards")
    return losses, said


def _go_on(folder: Path) -> dict[str, list[float]]:
    """Losses after each of what was saved is read; an exported file has no moments."""
    losses = dict[str, list[float]]()
    for number, read in enumerate(READ):
        model, optimizer = _sharded(seed=1 + number)
        if read == "shards":
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.load(state, checkpoint_id=folder / "shards")
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        else:
            weights, moments = torch.load(folder / "whole.pt")
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=WHOLE)
        if read == "exported":
            nn.init.zeros_(model.layers[0].weight)
            model.load_state_dict(load_file(folder / "exported.safetensors"))
        losses[read] = train(model, optimizer, ROWS, range(SAVED, STEPS))
    return losses


def test_others_on_other_hosts_go_on_from_a_checkpoint(hosts: list[Any], disks: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    expected = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), ROWS, range(STEPS))
    saved = run_on(two_of_each(hosts), _saves, disks)
    assert_mean([losses for losses, _ in saved], expected[:SAVED], rtol=1e-5)
    for ranks in (hosts, hosts[:2]):
        found = run_on(ranks, _go_on, disks)
        for read in READ:
            assert_mean([losses[read] for losses in found], expected[SAVED:], rtol=1e-5)
    # One rank knows what is missing: it writes the metadata, and has the files of its own host before it.
    (said,), *others = [said for _, said in saved]
    assert said.startswith(f"2 of the 4 files of the checkpoint in {disks}/disk/shards, ") and hosts[0].name in said
    assert others == [[], [], []]
