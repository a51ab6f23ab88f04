"""A training for torchrun, which may start it again: it goes on from its last checkpoint. `elastic_job.py FOLDER`"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from host_ranks import Net, own_disk, train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zerograph

ROWS, STEPS, EVERY, KILLED = 8, 6, 2, 3
"""A checkpoint is saved after so many steps; rank 3 is killed in its step of that number, the first time."""


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, disk = Net(), own_disk(folder)
    backend = zerograph.backend(stage=3, compute="eager", offload="parameters", path=str(disk))
    zerograph.shard(model, backend)
    model.compile(backend=backend)
    optimizer = zerograph.optim.AdamW(model.parameters(), lr=1e-3)
    first = max((int(path.parent.name) for path in folder.glob("saved/*/.metadata")), default=0)
    if first:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=folder / "saved" / str(first))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    rank, losses = dist.get_rank(), list[float]()
    for step in range(first, STEPS):
        if step == KILLED and not first:
            dist.barrier()  # all have written their losses
            if rank == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        losses += train(model, optimizer, ROWS, [step])
        (folder / f"rank {rank} from {first}.json").write_text(json.dumps(losses))
        if (step + 1) % EVERY == 0:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "saved" / str(step + 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
