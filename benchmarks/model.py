"""The models that the benchmarks here train, and the data they are trained on: a GPT, or one of transformers' models.

The GPT is GPT-2's block (LayerNorm and Linear with bias, fused qkv, gelu MLP of four times the width) with learned
positions and an untied vocabulary head. The loss is part of `forward`, in fp32, so that every variant does the same
work inside and outside of what it compiles. Those of transformers are called as users call them: with labels, and with
their cache at the default, so that a Llama returns the keys and values of every layer. Their weights are random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Workload:
    """One model and one batch: what a step of a benchmark computes on each rank."""

    layers: int = 6
    dim: int = 512
    heads: int = 8
    vocab: int = 8192
    batch: int = 4
    seq: int = 128
    dtype: str = "fp32"  # "fp32" | "bf16": bf16 compute over fp32 master parameters
    device: str = "cpu"
    model: str = "gpt"  # or a name in TRANSFORMERS; a vision model takes images of seq x seq and has vocab classes

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32

    @property
    def parameters(self) -> int:
        """Elements in the model; of a GPT without building it."""
        if self.model != "gpt":
            with torch.device("meta"):
                return sum(p.numel() for p in TRANSFORMERS[self.model](self).parameters())
        block = 12 * self.dim**2 + 13 * self.dim
        return self.layers * block + (2 * self.vocab + self.seq + 2) * self.dim

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products of one training step of one rank."""
        tokens = self.batch * self.seq
        weights = self.layers * 12 * self.dim**2 + self.vocab * self.dim
        attention = self.layers * 2 * self.seq * self.dim
        return 6 * tokens * (weights + attention)

    def describe(self) -> str:
        name = "GPT" if self.model == "gpt" else self.model
        return (
            f"{name}, {self.layers} layers, d={self.dim}, {self.heads} heads, vocabulary {self.vocab}: "
            f"{self.parameters / 1e6:.1f} M parameters; batch {self.batch} x {self.seq} per rank, {self.dtype}, "
            f"{self.flops / 1e9:.1f} GFLOP of matrix products per rank and step"
        )


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attention(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        heads = self.qkv(x).view(batch, seq, 3, self.heads, dim // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, seq, dim))


class GPT(nn.Module):
    """`forward(tokens, targets)`, both int64 of shape (batch, seq), gives the mean cross-entropy, a 0-d fp32 tensor."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.tokens = nn.Embedding(work.vocab, work.dim)
        self.positions = nn.Embedding(work.seq, work.dim)
        self.blocks = nn.ModuleList(Block(work.dim, work.heads) for _ in range(work.layers))
        self.norm = nn.LayerNorm(work.dim)
        self.head = nn.Linear(work.dim, work.vocab, bias=False)
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def trunk(self, tokens: Tensor) -> Tensor:
        """What the head reads: (batch, seq, dim)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.trunk(tokens))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def build_model(work: Workload, seed: int = 0) -> Any:
    """The same weights for every variant and rank; its repeated layers are called `blocks`."""
    torch.manual_seed(seed)
    with torch.device(work.device):
        return GPT(work) if work.model == "gpt" else TRANSFORMERS[work.model](work)


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The repeated layers that users of `fully_shard` wrap and compile one by one."""
    return model.blocks if isinstance(model, GPT) else model.model.layers


def llama(work: Workload) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": work.vocab, "hidden_size": work.dim, "intermediate_size": 8 * work.dim // 3}
    config = LlamaConfig(**sizes, num_hidden_layers=work.layers, num_attention_heads=work.heads)
    return LlamaForCausalLM(config)  # not a class of its own: its name tells transformers which loss to take


def qwen(work: Workload) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": work.vocab, "hidden_size": work.dim, "intermediate_size": 11 * work.dim // 4}
    heads = {"num_attention_heads": work.heads, "num_key_value_heads": max(1, work.heads // 4)}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, num_hidden_layers=work.layers, tie_word_embeddings=True))


def mixtral(work: Workload) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": work.vocab, "hidden_size": work.dim, "intermediate_size": 2 * work.dim}
    heads = {"num_attention_heads": work.heads, "num_key_value_heads": max(1, work.heads // 4)}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_hidden_layers=work.layers, num_local_experts=4))


def gemma2(work: Workload) -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"vocab_size": work.vocab, "hidden_size": work.dim, "intermediate_size": 4 * work.dim}
    heads = {"num_attention_heads": work.heads, "num_key_value_heads": work.heads // 2}
    attention = {"head_dim": work.dim // work.heads, "sliding_window": work.seq // 2}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, **attention, num_hidden_layers=work.layers))


def neox(work: Workload) -> nn.Module:
    """GPT-NeoX, as in Pythia."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"vocab_size": work.vocab, "hidden_size": work.dim, "intermediate_size": 4 * work.dim}
    config = GPTNeoXConfig(**sizes, num_hidden_layers=work.layers, num_attention_heads=work.heads)
    return GPTNeoXForCausalLM(config)


def t5(work: Workload) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": work.vocab, "d_model": work.dim, "d_kv": work.dim // work.heads, "d_ff": 4 * work.dim}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0}
    return T5ForConditionalGeneration(
        T5Config(**sizes, **tokens, num_layers=work.layers, num_heads=work.heads, dropout_rate=0.0)
    )


def bert(work: Workload) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": work.vocab, "hidden_size": work.dim, "intermediate_size": 4 * work.dim}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(
        BertConfig(**sizes, **dropout, num_hidden_layers=work.layers, num_attention_heads=work.heads)
    )


def vit(work: Workload) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"image_size": work.seq, "patch_size": 8, "hidden_size": work.dim, "intermediate_size": 4 * work.dim}
    return ViTForImageClassification(
        ViTConfig(**sizes, num_hidden_layers=work.layers, num_attention_heads=work.heads, num_labels=work.vocab)
    )


def resnet(work: Workload) -> nn.Module:
    """ResNet-50; its layers and widths are its own."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=work.vocab))


TRANSFORMERS: dict[str, Callable[[Workload], nn.Module]] = {
    make.__name__: make for make in (llama, qwen, mixtral, gemma2, neox, t5, bert, vit, resnet)
}
VISION = ("vit", "resnet")


def called(work: Workload, forward: Callable[..., Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """`forward`, of one of these models or of what wraps it, as a function of inputs and targets that gives a loss."""
    if work.model == "gpt":
        return forward
    if work.model in VISION:
        return lambda images, labels: forward(pixel_values=images, labels=labels).loss
    return lambda tokens, _: forward(input_ids=tokens, labels=tokens).loss  # causal models shift labels themselves


def batches(work: Workload, rank: int, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """`count` fixed batches of random tokens or images, different on each rank, the same for every variant."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if work.model in VISION:
        images = torch.randn((count, work.batch, 3, work.seq, work.seq), generator=generator).to(work.device)
        labels = torch.randint(work.vocab, (count, work.batch), generator=generator).to(work.device)
        return list(zip(images, labels, strict=True))
    shape = (count, work.batch, work.seq + 1)
    text = torch.randint(work.vocab, shape, generator=generator).to(work.device)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in text]
