"""Train with 65,536 words and long sequences, where logits would take more memory than all the rest.

python examples/08_long_context.py [tiles]     (or torchrun --nproc-per-node 2; 1 leaves logits whole, to compare)

A word is two bytes. Logits of 2 x 1024 tokens take 512 MiB, and a step holds three tensors as large; in 16 tiles of
tokens, head and loss hold a sixteenth of each. The loss is the same.
"""

import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, Config
from text import load

import zerograph

STEPS, BATCH = 10, 2  # the batch is per rank
TILES = int(sys.argv[1]) if len(sys.argv) > 1 else 16

if "RANK" in os.environ:  # torchrun started this process
    dist.init_process_group("gloo")
rank = dist.get_rank() if dist.is_initialized() else 0

torch.manual_seed(0)
model = GPT(Config(vocab=2**16, context=1024, layers=2))
backend = zerograph.backend(stage=3, loss_tiles=TILES)
model.compile(backend=backend)
optimizer = zerograph.optim.AdamW(model.parameters(), lr=1e-3)

data = load()[0]
words = data[: len(data) // 2 * 2].view(-1, 2).to(torch.int64) @ torch.tensor([256, 1])
generator = torch.Generator().manual_seed(rank)
for step in range(1, STEPS + 1):
    starts = torch.randint(len(words) - model.config.context - 1, (BATCH,), generator=generator)
    batch = torch.stack([words[s : s + model.config.context + 1] for s in starts])
    loss = model(batch[:, :-1], batch[:, 1:].contiguous())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        peak = int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024
        print(f"step {step:3}  loss {loss.item():.4f}  at most {peak / 2**20:.0f} MiB so far", flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
