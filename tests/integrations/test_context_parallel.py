"""Sequences that ranks share, against plain PyTorch on one process with all of each.

Tests ``integrations/torch_private.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import zerograph
from zerograph.core.errors import ConfigError, UnsupportedError
from zerograph.integrations.context_parallel import ulysses, ulysses_attention
from zerograph.runtime.torch_private import local_tensor

VOCABULARY, HEADS = 50, 4


class Attention(nn.Module):
    def __init__(self, width: int, key_heads: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.size, self.key_heads, self.group = width // HEADS, key_heads, group
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.keys = nn.Linear(width, 2 * key_heads * self.size)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(2, (HEADS, self.size)).transpose(1, 2)
        key, value = self.keys(x).unflatten(2, (2 * self.key_heads, self.size)).transpose(1, 2).chunk(2, dim=1)
        options = {"is_causal": True, "enable_gqa": self.key_heads < HEADS}
        if self.group is None:
            found = F.scaled_dot_product_attention(query, key, value, **options)
        else:
            found = ulysses(query, key, value, self.group, **options)
        return self.out(found.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, width: int, depth: int, key_heads: int, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(Attention(width, key_heads, group) for _ in range(depth))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def _trained(dp: int, cp: int, tokens: int, steps: int, model: tuple[int, int, int], options: dict[str, Any]) -> int:
    """Compare each step; returns the number of frames."""
    mesh = init_device_mesh("cpu", (dp, cp), mesh_dim_names=("dp", "cp"))
    net, plain = Net(*model, mesh["cp"].get_group()), Net(*model)
    backend = zerograph.backend(mesh=mesh["dp", "cp"]._flatten("dp_cp"), **options)
    net.compile(backend=backend)
    first = dist.get_rank() == 0  # which computes whole sequences, and compares
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5, momentum=0.9) for one in (net, plain)[: 1 + first]]
    batch, place = mesh["dp"].get_local_rank(), mesh["cp"].get_local_rank()
    for step in range(steps):
        ids = torch.randint(0, VOCABULARY, (dp, tokens + 1), generator=torch.Generator().manual_seed(step))
        here = slice(place * (tokens // cp), (place + 1) * (tokens // cp))
        part = net(ids[batch : batch + 1, :-1][:, here], ids[batch : batch + 1, 1:][:, here])
        mean = part.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses = [part]
        if first:
            losses.append(plain(ids[:, :-1], ids[:, 1:]))
            assert mean.item() == pytest.approx(losses[1].item(), rel=1e-5)
        for loss, one, optimizer in zip(losses, (net, plain), optimizers, strict=False):
            loss.backward()
            zerograph.clip_grad_norm_(one.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    with zerograph.gathered(net):
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            if first:
                torch.testing.assert_close(local_tensor(mine), theirs, rtol=1e-4, atol=1e-5)
    assert not backend.report().graph_breaks
    return len(backend.frames)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("dp", "cp", "options"),
    [
        (2, 2, {"stage": 3}),
        (1, 4, {"stage": 0, "recompute": "full"}),
    ],
)
def test_losses_are_those_of_whole_sequences(dp: int, cp: int, options: dict[str, Any]) -> None:
    assert run(dp * cp, _trained, dp, cp, 64, 4, (32, 2, 4 if cp == 4 else 2), options) == [1] * dp * cp


@pytest.mark.slow
def test_8k_tokens_on_four_ranks() -> None:
    run(4, _trained, 1, 4, 2**13, 1, (32, 1, 4), {"stage": 3}, timeout=500)


def _heads_that_do_not_divide() -> None:
    assert dist.group.WORLD is not None
    query, key = torch.randn(1, 4, 8, 2), torch.randn(1, 1, 8, 2)
    with pytest.raises(ConfigError, match=r"\[4, 1, 1\], do not divide by the 2 ranks"):
        ulysses(query, key, key, dist.group.WORLD)
    with pytest.raises(ConfigError, match="get_group"):
        ulysses(query, query, query, "cp")  # type: ignore[arg-type]


def test_heads_that_do_not_divide_are_refused() -> None:
    run(2, _heads_that_do_not_divide)


def _llama(attention: str, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, **sizes, **changes, attn_implementation=attention, use_cache=False)
    return LlamaForCausalLM(config)


def _of_transformers(key_heads: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    plain = _llama("sdpa", num_key_value_heads=key_heads)
    model = _llama(ulysses_attention(group), num_key_value_heads=key_heads)
    model.compile(backend=zerograph.backend(stage=3))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    tokens, world = 32, dist.get_world_size()
    positions = torch.arange(tokens).unsqueeze(0)
    for step in range(3):
        ids = torch.randint(0, VOCABULARY, (2, tokens + 1), generator=torch.Generator().manual_seed(step))
        targets = ids[:, 1:].contiguous()
        whole = plain(ids[:, :-1], labels=targets, shift_labels=targets).loss
        here = slice(dist.get_rank() * (tokens // world), (dist.get_rank() + 1) * (tokens // world))
        own = targets[:, here].contiguous()
        part = model(ids[:, :-1][:, here], position_ids=positions[:, here], labels=own, shift_labels=own).loss
        mean = part.detach() / world
        dist.all_reduce(mean)
        assert mean.item() == pytest.approx(whole.item(), rel=1e-5)
        for loss, optimizer in zip((part, whole), optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(UnsupportedError, match="attention_mask is given"):
        model(ids[:, :8], attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]] * 2))
    packed = positions[:, here] % (tokens - 4)  # a document ends on the last rank
    for given in ({}, {"position_ids": packed}):
        with pytest.raises(RuntimeError, match="position_ids are not those of this rank's tokens"):
            model(ids[:, here], labels=own, shift_labels=own, **given)


@pytest.mark.costly
@pytest.mark.parametrize("key_heads", [2, 1])
def test_llama_of_transformers(key_heads: int) -> None:
    """Of one head of keys each rank has a copy."""
    run(2, _of_transformers, key_heads)


def _mistral() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    group = dist.group.WORLD
    assert group is not None
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = MistralConfig(
        vocab_size=VOCABULARY, **sizes, sliding_window=4, attn_implementation=ulysses_attention(group)
    )
    with pytest.raises(UnsupportedError, match="masks more than the tokens behind each"):
        MistralForCausalLM(config)(torch.zeros(1, 8, dtype=torch.int64))


def test_a_window_is_refused() -> None:
    run(2, _mistral)
