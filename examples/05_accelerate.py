"""Accelerate at ZeRO stage 3: the one line is where Accelerator comes from, and its backend=.

torchrun --nproc-per-node 2 examples/05_accelerate.py     (or python, as one process)
"""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zerograph

try:
    from zerograph.integrations.accelerate import Accelerator
except ImportError:
    raise SystemExit("this example needs accelerate\n\nhint: pip install '.[accelerate]' in the clone") from None


class Network(nn.Module):
    """Learns the sum of the squares of 8 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x).squeeze(-1), y)


backend = zerograph.backend(stage=3)
accelerator = Accelerator(backend=backend, gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())

torch.manual_seed(0)
model = Network()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
inputs = torch.randn(8192, 8)
data = TensorDataset(inputs, inputs.square().sum(-1))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=32, shuffle=True))

for epoch in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = model(x, y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}  loss {accelerator.reduce(loss.detach(), 'mean').item():.3f}")

folder = Path(tempfile.gettempdir(), "zerograph-accelerate")
accelerator.save_state(str(folder / "state"))  # shards, for load_state at any number of ranks
accelerator.save_model(model, str(folder / "whole"))  # model.safetensors, for anything
accelerator.load_state(str(folder / "state"))
accelerator.print(f"saved to {folder}")
accelerator.end_training()
