"""Small models whose steps differ in what depends on batch and sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention through SDPA and two products, maybe with dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.heads, self.dropout = nn.LayerNorm(width), 2, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + F.dropout(self.out(found.transpose(1, 2).flatten(2)), self.dropout)
        return x + self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    """Token ids to logits, or with ``loss`` to their cross-entropy.

    ``positions``: rows of a table that is looked up by position; with ``sliced``, of which the first rows are taken.
    """

    def __init__(
        self, width: int = 32, depth: int = 1, dropout: float = 0.0, loss: bool = False, positions: int = 0,
        sliced: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.loss, self.sliced = loss, sliced
        self.embed, self.head = nn.Embedding(64, width), nn.Linear(width, 64, bias=False)
        self.positions = nn.Embedding(positions, width) if positions else None
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.positions is not None and self.sliced:
            x = x + self.positions.weight[: ids.shape[1]]
        elif self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()) if self.loss else logits


class MLP(nn.Module):
    """Vectors to the mean squared error of what they should be."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), wanted)


class Halving(nn.Module):
    """A convolution that leaves every second position: sizes that are quotients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.halve = nn.Conv1d(16, 16, 3, stride=2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.halve(self.embed(ids).transpose(1, 2)).transpose(1, 2))


class Padded(nn.Module):
    """Takes another way where the sequence is no multiple of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if ids.shape[1] % 8:
            x = F.pad(x, (0, 0, 0, 8 - ids.shape[1] % 8))
        return self.head(x)


class Rigid(nn.Module):
    """Adds a table to every sequence, which has to be of its length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.table = nn.Parameter(torch.zeros(12, 16))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids) + self.table)


class Windows(nn.Module):
    """Splits a sequence into windows of 8, with code for a sequence of exactly 64."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).unflatten(1, (-1, 8))
        x = (x + x.mean(2, keepdim=True)).flatten(1, 2)
        if ids.shape[1] == 64:
            x = x.relu()
        return self.head(x)


def ids(batch: int = 2, seq: int = 12) -> Tensor:
    return torch.zeros(batch, seq, dtype=torch.int64)


def llama() -> tuple[nn.Module, dict[str, Any]]:
    """A Llama of transformers with grouped queries, its loss part of the step."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, use_cache=False,
    )  # fmt: skip
    tokens = ids()
    return transformers.LlamaForCausalLM(config).train(), {"input_ids": tokens, "labels": tokens}
