"""A small byte-level GPT: plain PyTorch, nothing in it knows that it will be sharded."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from text import batches
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    vocab: int = 256  # one token per byte: no tokenizer
    context: int = 128
    layers: int = 4
    heads: int = 6
    width: int = 192


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (self.split_heads(part) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def split_heads(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, heads, length, width / heads)"""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.bytes = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.apply(init_weights)
        for block in self.blocks:  # each block adds twice to x: smaller steps keep its scale as depth grows
            for linear in (block.out, block.mlp[-1]):
                nn.init.normal_(linear.weight, std=0.02 / (2 * config.layers) ** 0.5)
        self.head.weight = self.bytes.weight  # tied: a byte is read and predicted by one vector

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (batch, length, vocab); with targets, their mean cross-entropy in nats per byte."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


@torch.no_grad()
def generate(model: GPT, prompt: bytes, count: int, temperature: float = 0.8, seed: int = 0) -> bytes:
    """The prompt and `count` sampled bytes. With a sharded model, every rank takes part."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)  # one seed: every rank samples the same bytes
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(count):
        logits = model(tokens[:, -model.config.context :])[:, -1]
        probabilities = torch.softmax(logits / temperature, dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return bytes(tokens[0].tolist())


@torch.no_grad()
def evaluate(model: GPT, text: Tensor) -> float:
    """The mean loss over fixed batches of a text: the same on every rank, and in every run."""
    device = next(model.parameters()).device
    drawn = batches(text, count=16, size=8, length=model.config.context, seed=0)
    return torch.stack([model(x.to(device), y.to(device)) for x, y in drawn]).mean().item()
