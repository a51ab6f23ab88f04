"""Train a byte-level GPT at ZeRO stage 3 on real text, sample from it, and save a checkpoint.

torchrun --nproc-per-node 2 examples/01_first_run.py [checkpoint folder]     (or python, as one process)
"""

import math
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, Config, evaluate, generate
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from text import batches, load
from torch.distributed.checkpoint.state_dict import get_state_dict

import zerograph

STEPS, WARMUP, BATCH = 400, 40, 8  # the batch is per rank
FOLDER = sys.argv[1] if len(sys.argv) > 1 else "checkpoints/demo"


def schedule(step: int) -> float:
    """A linear warmup, then a cosine down to a tenth of the peak."""
    return min((step + 1) / WARMUP, 0.55 + 0.45 * math.cos(math.pi * step / STEPS))


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if "RANK" in os.environ:  # torchrun started this process
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()  # gloo for CPU tensors, NCCL for CUDA tensors
rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

model = GPT(Config()).to(device)
backend = zerograph.backend(stage=3)
model.compile(backend=backend)  # all that is not plain PyTorch; below is the ordinary loop
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

length = model.config.context
train, held_out = load()
numbers = TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s")
columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), numbers, TimeRemainingColumn())
with Progress(*columns, disable=rank != 0) as progress:
    bar = progress.add_task("train", total=STEPS, loss=math.nan, speed=0)
    data = batches(train, STEPS, BATCH, length, seed=rank)  # other data on each rank
    for step, (x, y) in enumerate(data, start=1):
        loss = model(x.to(device), y.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

        if step == 1:
            started = time.perf_counter()  # the first step also compiles: it is left out of the speed
        speed = (step - 1) * world * BATCH * length / (time.perf_counter() - started)
        progress.update(bar, completed=step, loss=loss.item(), speed=speed)
        if rank == 0 and (step == 1 or step % 50 == 0):
            progress.print(f"step {step:4}  loss {loss.item():.3f}")

# The parameters stay sharded, so every rank takes part in what follows.
model.eval()
held_out_loss = evaluate(model, held_out)
sample = generate(model, b"def ", 300)
weights, moments = get_state_dict(model, optimizer)
state = {"model": weights, "optimizer": moments, "scheduler": scheduler, "step": step, "loss": held_out_loss}
dcp.save(state, checkpoint_id=FOLDER)
if rank == 0:
    print(f"\n{sample.decode(errors='replace')}\n\n{backend.report()}\n")
    print(f"held-out loss {held_out_loss:.4f}, checkpoint of {world} rank(s) in {FOLDER}")
if dist.is_initialized():
    dist.destroy_process_group()
