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
from zerograph.integrations.context_parallel import ulysses, ulysses_attention, whole_mask
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
    packed = positions[:, here] % (tokens - 4)  # a document ends on the last rank
    for given in ({}, {"position_ids": packed}):
        with pytest.raises(RuntimeError, match="position_ids are not those of this rank's tokens"):
            model(ids[:, here], labels=own, shift_labels=own, **given)


@pytest.mark.costly
@pytest.mark.parametrize("key_heads", [2, 1])
def test_llama_of_transformers(key_heads: int) -> None:
    """Of one head of keys each rank has a copy."""
    run(2, _of_transformers, key_heads)


def _positions(documents: list[list[int]]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in documents])


def _seen(positions: Tensor, padding: Tensor, window: int) -> Tensor:
    """Of whole sequences, token by token."""
    seen = torch.zeros(*positions.shape, positions.shape[1], dtype=torch.bool)
    for row, own in enumerate(positions.tolist()):
        for token, position in enumerate(own):
            for back in range(min(position + 1, window)):
                seen[row, token, token - back] = padding[row, token - back]
    return seen[:, None]


class Masked(nn.Module):
    """Two attentions that share a mask, in one process (``group`` None) by a plain one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.group, self.embed = group, nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))

    def forward(self, tokens: Tensor, positions: Tensor, padding: Tensor, window: int) -> Tensor:
        x = self.embed(tokens)
        if self.group is not None:
            mask = whole_mask(positions, self.group, padding, window)
        else:
            mask = _seen(positions, padding, window)
        for layer in self.layers:
            three = layer(x).unflatten(2, (3 * HEADS, 4)).transpose(1, 2).chunk(3, dim=1)
            if self.group is not None:
                found = ulysses(*three, self.group, attn_mask=mask)
            else:
                found = F.scaled_dot_product_attention(*three, attn_mask=mask)
            x = x + found.transpose(1, 2).flatten(2)
        return (x.sin() * padding[..., None]).sum()


def _masked(compute: Any) -> None:
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    net, plain = Masked(group).double(), Masked(None).double()
    net.compile(backend=zerograph.backend(stage=2, compute=compute))
    positions = _positions([[5, 11], [9, 4, 3]])  # on 2 and on 4 ranks documents lie over the end of one
    padding = torch.ones(2, 16, dtype=torch.int64)
    padding[0, :2], padding[1, -5:] = 0, 0  # on 4 ranks the last one has nothing else
    here = slice(rank * (16 // world), (rank + 1) * (16 // world))
    for step in range(2):
        ids = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(step))
        part = net(ids[:, here], positions[:, here], padding[:, here], 4)
        whole = plain(ids, positions, padding, 4)
        total = part.detach().clone()
        dist.all_reduce(total)
        assert total.item() == pytest.approx(whole.item(), rel=1e-12)
        (part * world).backward()
        whole.backward()
    with torch.no_grad():
        for one in (*net.parameters(), *plain.parameters()):
            assert one.grad is not None
            one -= 0.1 * one.grad
    with zerograph.gathered(net):
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(local_tensor(mine), theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("world", "compute"), [(2, "inductor"), (4, "eager")])
def test_masks_of_documents_padding_and_windows(world: int, compute: str) -> None:
    run(world, _masked, compute)


def _wrong_pieces() -> None:
    group, ones = dist.group.WORLD, torch.ones(2, 8, dtype=torch.int64)
    assert group is not None
    for given, match in (
        ({"positions": ones[0]}, r"positions must be a tensor \[batch, tokens\] .* got \[8\]"),
        ({"positions": None}, "positions must be a tensor .* got NoneType"),
        ({"padding": ones[:, 1:]}, r"padding must be a tensor .* got \[2, 7\]"),
        ({"window": 0}, "window must be a number of tokens, got 0"),
        ({"group": "cp"}, "get_group"),
    ):
        with pytest.raises(ConfigError, match=match):
            whole_mask(**{"positions": ones, "group": group} | given)  # type: ignore[arg-type]


def test_pieces_of_other_shapes_are_refused() -> None:
    run(1, _wrong_pieces)


def _causal_lm(name: str, attention: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False, "pad_token_id": None}
    config = AutoConfig.for_model(name, **sizes | more | changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).double()


HALF = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
OSS = HALF | {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
DOCUMENTS = [[5, 14, 13], [1, 31]]


def _inputs(kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments beside tokens, and which tokens have a target: of 32 tokens of two sequences."""
    positions, has_target = torch.arange(32).expand(2, -1), torch.ones(2, 32, dtype=torch.bool)
    if kind == "packed":
        positions = _positions(DOCUMENTS)
        has_target[:, :-1] = positions[:, 1:] != 0
        return {"position_ids": positions}, has_target
    if kind == "padding":
        has_target[0, :5], has_target[1, -9:] = False, False
        return {"position_ids": positions, "attention_mask": has_target.long()}, has_target
    if kind == "prefix":
        seen = torch.ones(2, 1, 32, 32, dtype=torch.bool).tril()
        seen[1, :, :, :7] = True
        return {"position_ids": positions, "attention_mask": seen}, has_target
    return {"position_ids": positions}, has_target


def _as_on_one_process(name: str, changes: dict[str, Any], kind: str, stage: int) -> int:
    """Returns how many pieces the last forward gathered."""
    group, world = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    plain = _causal_lm(name, "eager" if name in ("gemma2", "gpt_oss") else "sdpa", **changes)
    model = _causal_lm(name, ulysses_attention(group, packed=kind == "packed"), **changes)
    backend = zerograph.backend(stage=stage, compute="inductor" if world == 2 and stage == 3 else "eager")
    model.compile(backend=backend)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    given, has_target = _inputs(kind)
    here = slice(dist.get_rank() * (32 // world), (dist.get_rank() + 1) * (32 // world))
    pieces = {key: value if value.ndim == 4 else value[:, here] for key, value in given.items()}
    for step in range(3):
        ids = torch.randint(0, VOCABULARY, (2, 33), generator=torch.Generator().manual_seed(step))
        targets = ids[:, 1:].where(has_target, -100)
        whole = plain(ids[:, :-1], labels=targets, shift_labels=targets, **given).loss
        own = targets[:, here].contiguous()
        count = has_target.sum() / world  # of the mean over ranks
        with torch.profiler.profile() as profile:
            part = model(ids[:, :-1][:, here], labels=own, shift_labels=own, num_items_in_batch=count, **pieces).loss
        mean = part.detach() / world
        dist.all_reduce(mean)
        assert mean.item() == pytest.approx(whole.item(), rel=1e-6)
        for loss, optimizer in zip((part, whole), optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with zerograph.gathered(model):
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(local_tensor(mine), theirs, rtol=1e-6, atol=1e-7)
    breaks = backend.report().graph_breaks
    assert not breaks, breaks
    return [event.name for event in profile.events()].count("_c10d_functional::all_gather_into_tensor")


@pytest.mark.costly
@pytest.mark.parametrize(
    ("world", "name", "changes", "kind", "stage"),
    [
        (2, "mistral", {"sliding_window": 6}, "window", 3),
        (2, "qwen2", {"use_sliding_window": True} | HALF, "padding", 1),
        (4, "qwen3", {"use_sliding_window": True} | HALF, "packed", 3),
        (2, "gemma3_text", HALF, "packed", 0),
        (4, "gemma3_text", HALF, "padding", 2),
        (2, "gemma2", {"attn_logit_softcapping": 1.0} | HALF, "window", 3),
        (4, "gemma2", {"attn_logit_softcapping": 1.0} | HALF, "packed", 2),
        (2, "gpt_oss", OSS, "padding", 3),
        (4, "gpt_oss", OSS, "window", 1),
        (2, "llama", {}, "prefix", 3),
        (2, "llama", {}, "padding", 0),
    ],
)
def test_models_of_transformers_mask_as_on_one_process(
    world: int, name: str, changes: dict[str, Any], kind: str, stage: int
) -> None:
    """On 4 ranks two heads of keys are fewer than the ranks, and one rank has nothing but padding."""
    gathered = 1 if kind in ("padding", "packed") else 0  # in all layers together
    assert run(world, _as_on_one_process, name, changes, kind, stage, timeout=400) == [gathered] * world


def _refused() -> None:
    from transformers import LlamaConfig
    from transformers.masking_utils import create_causal_mask

    group, ids, rank = dist.group.WORLD, torch.zeros(1, 8, dtype=torch.int64), dist.get_rank()
    assert group is not None
    places = {"position_ids": torch.arange(8 * rank, 8 * rank + 8)[None]}
    one, packed = ulysses_attention(group), ulysses_attention(group, packed=True)
    ones = torch.ones(1, 16, dtype=torch.int64)
    cases: list[tuple[type[Exception], str, str, str, dict[str, Any], dict[str, Any]]] = [
        (UnsupportedError, "is given cu_seq_lens_q", "llama", packed, {}, {"cu_seq_lens_q": ones[0]}),
        (ConfigError, "is of 16 tokens, and this rank has 8", "llama", one, {}, {"attention_mask": ones}),
        (ConfigError, "beside packed documents", "llama", packed, {}, {"attention_mask": ones[:, :8]}),
        (ConfigError, r"not of the 16 tokens", "llama", one, {}, {"attention_mask": ones[:, None, :8, None] > 0}),
        (UnsupportedError, "in chunks, as Llama 4 does", "llama4_text", one, {}, {}),
        (UnsupportedError, "keys that it makes of several tokens", "deepseek_v4", one, {}, {}),
        (UnsupportedError, "more than a causal window", "gemma3_text", one, {"use_bidirectional_attention": True}, {}),
        (RuntimeError, "position_ids are the first ones on each rank", "llama", packed, {}, {"position_ids": None}),
    ]
    for error, match, name, attention, changes, given in cases:
        with pytest.raises(error, match=match):
            _causal_lm(name, attention, **changes)(ids, **places | given)
    config = LlamaConfig(attn_implementation=one)
    images = {
        "block_sequence_ids": torch.tensor([[-1, -1, 0, 0, 0, -1, -1, -1]]),
        "cache": None,
        "attention_mask": None,
    }
    with pytest.raises(RuntimeError, match="lets tokens see those behind them"):
        create_causal_mask(config, torch.zeros(1, 8, 4), **images, **places)
    with pytest.raises(ConfigError, match="packed must be True or False"):
        ulysses_attention(group, packed=[4, 4])  # type: ignore[arg-type]


def test_what_no_mask_can_say_is_refused() -> None:
    run(2, _refused)


def _torchs_ring() -> None:
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = Net(32, 1, HEADS)
    net.compile(backend=zerograph.backend(stage=3, compute="eager"))
    ids = torch.zeros(2, 16, dtype=torch.int64)
    with (
        context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]),
        pytest.raises(NotImplementedError, match="_scaled_dot_product_flash_attention_for_cpu"),
    ):
        net(ids, ids)


def test_torchs_ring_has_no_attention_for_cpus() -> None:
    """As docs/guide/limits.md says: a torch in which it has one fails here."""
    run(2, _torchs_ring)
