"""``MODEL`` given by its sizes alone: the transformer of a
:class:`~zerograph.planner.estimate.sizes.ModelSize`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerograph.planner.estimate.sizes import ModelSize


class SizedLayer(nn.Module):
    """Attention of four matrices, an MLP of four times the width, and norms without weights: the formula has none."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        width = size.hidden
        self.heads = size.heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attention(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """A causal language model of ``12*L*h*h + V*h`` parameters, its head tied to its embedding.

    ``forward(tokens)``, int64 of shape (batch, seq), gives the mean cross-entropy of each next token.
    """

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.hidden)
        self.layers = nn.ModuleList(SizedLayer(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.hidden, elementwise_affine=False)
        self.head = nn.Linear(size.hidden, size.vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        # Labels are shifted, and not logits, which then may be made in tiles; of -100 the loss is nothing.
        labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def transformer(size: ModelSize, batch: int, seq: int) -> tuple[nn.Module, tuple[Tensor]]:
    """The model and token ids for it."""
    return Transformer(size), (torch.zeros(batch, seq, dtype=torch.int64),)
