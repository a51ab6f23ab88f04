"""Train one linear layer of 4 GiB, with 12 GiB of gradients and optimizer states, in a process of 1.2 GiB.

python examples/09_giant_layer.py FOLDER [GiB] [steps]     (FOLDER is on a disk with 5 times as much free)

The layer guesses the next two bytes of a text, one of 65,536 words, from the trigrams of the 64 bytes before. All of it
lives in files without names. A product reads the weight tile by tile, 1/32 of it at a time; a tile of its gradient is
written as it is made, and the update streams what there is in slots.
"""

import re
import sys
import time
from pathlib import Path

import torch
from text import load
from torch import nn

import zerograph

if len(sys.argv) < 2:
    raise SystemExit(__doc__)
GIB = float(sys.argv[2]) if len(sys.argv) > 2 else 4
STEPS = int(sys.argv[3]) if len(sys.argv) > 3 else 3
WORDS, BATCH, CONTEXT, TILES = 2**16, 64, 64, 32
TRIGRAMS = int(GIB * 2**30) // (4 * WORDS)  # in so many classes


class Guess(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(TRIGRAMS, WORDS, bias=False)

    def forward(self, bag: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(bag), words)


def batch(data: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - CONTEXT - 2, (BATCH, 1), generator=generator)
    text = data[starts + torch.arange(CONTEXT + 2)].long()
    trigrams = (text[:, :-4] * 7919 + text[:, 1:-3] * 104729 + text[:, 2:-2] * 1299709) % TRIGRAMS
    bag = torch.zeros(BATCH, TRIGRAMS).scatter_add_(1, trigrams, torch.ones(trigrams.shape))
    return bag, text[:, -2] * 256 + text[:, -1]


def say(text: str) -> None:
    # The process's own peak: `ru_maxrss` of a child starts at what its parent held.
    peak = int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024
    print(f"{text}   at most {peak / 2**30:.2f} GiB in memory so far", flush=True)


torch.manual_seed(0)
with torch.device("meta"):  # no memory yet
    model = Guess()
backend = zerograph.backend(stage=3, offload="parameters", tier="nvme", path=sys.argv[1], tile=TILES)
zerograph.shard(model, backend, device="cpu")
begin = time.perf_counter()
zerograph.materialize(model)  # straight into the files
say(f"{GIB:g} GiB made in {time.perf_counter() - begin:.0f} s")
model.compile(backend=backend)
optimizer = zerograph.optim.AdamW(model.parameters(), lr=3e-3)

data, generator = load()[0], torch.Generator().manual_seed(0)
for step in range(1, STEPS + 1):
    begin = time.perf_counter()
    bag, words = batch(data, generator)
    loss = model(bag, words)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    say(f"step {step}  loss {loss.item():.3f}  {time.perf_counter() - begin:.0f} s")
