"""Lightning's Trainer at ZeRO stage 3: the one line is the strategy. Fabric has ZeroGraphFabricStrategy.

python examples/06_lightning.py     (Lightning starts the second process itself; torchrun works too)
"""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zerograph

try:
    from lightning import LightningModule, Trainer

    from zerograph.integrations.lightning import ZeroGraphStrategy
except ImportError:
    raise SystemExit("this example needs lightning\n\nhint: pip install '.[lightning]' in the clone") from None


class Network(LightningModule):
    """Learns the sum of the squares of 8 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))

    def step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layers(x).squeeze(-1), y)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.step(batch)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("loss", self.step(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


torch.manual_seed(0)
inputs = torch.randn(8192, 8)
data = TensorDataset(inputs, inputs.square().sum(-1))
folder = Path(tempfile.gettempdir(), "zerograph-lightning")
trainer = Trainer(
    accelerator="auto",
    devices=2,
    strategy=ZeroGraphStrategy(zerograph.backend(stage=3)),
    max_epochs=3,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    default_root_dir=folder,
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
)
trainer.fit(
    Network(),
    DataLoader(data, batch_size=32, shuffle=True, num_workers=0),
    DataLoader(TensorDataset(*data[:256]), batch_size=32),
)
trainer.save_checkpoint(folder / "last")  # a folder of shards; trainer.fit(..., ckpt_path=) at any number of ranks
zerograph.export(trainer.lightning_module, folder / "model.safetensors")  # all ranks; one plain file
if trainer.is_global_zero:
    print(f"validation loss {trainer.callback_metrics['loss'].item():.3f}; saved to {folder}")
