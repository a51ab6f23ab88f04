"""Train the byte-level GPT with parameters, gradients and optimizer states in files; memory holds a few layers.

torchrun --nproc-per-node 2 examples/07_offload.py FOLDER [checkpoint folder]     (or python, as one process)

FOLDER is on the disk that the files shall be on. They have no names, and are gone with the processes.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, Config, evaluate, init_weights
from text import batches, load
from torch.distributed.checkpoint.state_dict import get_state_dict

import zerograph

STEPS, BATCH = 100, 8  # the batch is per rank
if len(sys.argv) < 2:
    raise SystemExit(__doc__)
CHECKPOINT = sys.argv[2] if len(sys.argv) > 2 else "checkpoints/demo"

if "RANK" in os.environ:  # torchrun started this process
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def say(text: str) -> None:
    if rank == 0:
        print(text, flush=True)


backend = zerograph.backend(stage=3, offload="parameters", tier="nvme", path=sys.argv[1])
with torch.device("meta"):  # no memory yet: a model may be larger than what there is
    model = GPT(Config())
zerograph.shard(model, backend, device="cpu")
zerograph.materialize(model, init=init_weights)  # one module after another, straight into the files
model.compile(backend=backend)
optimizer = zerograph.optim.AdamW(model.parameters(), lr=1e-3)  # reads, updates and writes at once
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))

train, held_out = load()
for step, (x, y) in enumerate(batches(train, STEPS, BATCH, model.config.context, seed=rank), start=1):
    loss = model(x, y)
    loss.backward()
    optimizer.step(clip=1.0)
    optimizer.zero_grad()
    scheduler.step()
    if step == 1 or step % 20 == 0:
        say(f"step {step:4}  loss {loss.item():.3f}")

# A checkpoint does not say where tensors lived: 02_resume.py goes on with it in memory, on any number of ranks.
model.eval()
held_out_loss = evaluate(model, held_out)
weights, moments = get_state_dict(model, optimizer)
state = {"model": weights, "optimizer": moments, "scheduler": scheduler, "step": step, "loss": held_out_loss}
dcp.save(state, checkpoint_id=CHECKPOINT)
say(f"\n{backend.report()}\n")
say(f"held-out loss {held_out_loss:.4f}, checkpoint of {world} rank(s) in {CHECKPOINT}")
if dist.is_initialized():
    dist.destroy_process_group()
