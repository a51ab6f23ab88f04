"""Programs of a large world, compiled in one process: a fake group stands for 512 ranks and moves no data.

Results are garbage; what is checked is what each rank would send, and when.
"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from graphs import fake_world
from torch import Tensor, nn

import zerograph
from zerograph.core.instructions import Gather, Reduce
from zerograph.runtime.comm.collectives import GroupCommunicator

pytestmark = pytest.mark.slow

WORLD = 512
WIDTH, VOCAB, DEPTH = 512, 1000, 4  # the vocabulary does not divide by the world size, nor do norms have spare rows


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), 4
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class GPT(nn.Module):
    """Tied embedding and head, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.temperature


class Seen(dict[str, Any]):
    """What one rank compiled and holds."""


def _compile(rank: int, monkeypatch: pytest.MonkeyPatch) -> Seen:
    sent: list[tuple[str, int]] = []
    for name in ("start_gather", "start_reduce"):
        _record(name, sent, monkeypatch)
    with fake_world(rank, WORLD):
        torch.manual_seed(0)
        model = GPT()
        backend = zerograph.backend(stage=3, compute="eager", bucket_size="2MiB")
        model.compile(backend=backend)
        model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
        return Seen(
            collectives={k: list(p.collectives()) for k, p in backend.program.items()},
            digests={k: p.digest for k, p in backend.program.items()} | {"plan": backend.plan.digest},
            plan=backend.plan,
            programs=backend.program,
            sent=sent,
            local={n: p.to_local().numel() for n, p in model.named_parameters()},
            grads={n: p.grad.to_local().shape == p.to_local().shape for n, p in model.named_parameters()},
            peak=backend.report().peak_whole_buckets,
        )


def _record(name: str, sent: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Note how many bytes each collective takes from this rank."""
    original = getattr(GroupCommunicator, name)

    def recorded(self: GroupCommunicator, params: Any, tensors: Any, *behind: Any) -> Any:
        sent.append((name, sum(t.numel() * t.element_size() for t in tensors)))
        return original(self, params, tensors, *behind)

    monkeypatch.setattr(GroupCommunicator, name, recorded)


@pytest.fixture(scope="module")
def ranks() -> dict[int, Seen]:
    found = {}
    for rank in (0, 1, WORLD - 1):
        with pytest.MonkeyPatch.context() as monkeypatch:
            found[rank] = _compile(rank, monkeypatch)
    return found


def test_all_ranks_run_the_same_collectives_in_the_same_order(ranks: dict[int, Seen]) -> None:
    for other in (1, WORLD - 1):
        assert ranks[0]["collectives"] == ranks[other]["collectives"]
        assert ranks[0]["digests"] == ranks[other]["digests"]
        assert [name for name, _ in ranks[0]["sent"]] == [name for name, _ in ranks[other]["sent"]]


def test_each_rank_holds_its_part_of_every_parameter(ranks: dict[int, Seen]) -> None:
    params = {p.name: p for b in ranks[0]["plan"].buckets for p in b.params}
    for rank, seen in ranks.items():
        for name, elements in seen["local"].items():
            if name == "temperature":
                assert elements == 1
                continue
            assert elements == prod(params[name].shard_shape(rank))
    whole = sum(p.elements for p in params.values())
    padded = sum(p.chunk_elements for p in params.values())
    assert sum(ranks[0]["local"].values()) <= padded + 1 < 1.1 * whole / WORLD + 100
    assert sum(ranks[WORLD - 1]["local"].values()) < sum(ranks[0]["local"].values())  # 1000 rows end at rank 499


def test_gradients_have_the_shape_of_the_shards(ranks: dict[int, Seen]) -> None:
    assert all(all(seen["grads"].values()) for seen in ranks.values())


def test_every_bucket_is_gathered_for_each_pass_and_reduced_once(ranks: dict[int, Seen]) -> None:
    programs, plan = ranks[0]["programs"], ranks[0]["plan"]
    sharded = [b.index for b in plan.buckets if any(p.sharded for p in b.params)]
    gathered = [s.bucket for s in programs["forward"].instructions if isinstance(s, Gather)]
    assert set(gathered) == set(sharded)
    assert len(gathered) == len(sharded) + 1  # the embedding again, as the head
    reduced = [p.name for s in programs["backward"].instructions if isinstance(s, Reduce) for p in s.params]
    assert sorted(reduced) == sorted(p.name for b in plan.buckets for p in b.params)
    assert not any(isinstance(s, Reduce) for s in programs["forward"].instructions)
    assert ranks[0]["peak"] <= plan.prefetch + 1


def test_bytes_on_the_wire_are_those_of_zero_3(ranks: dict[int, Seen]) -> None:
    """Gathers take the shards, reductions the full gradients; the head's weight is gathered once more."""
    seen = ranks[0]
    params = {p.name: p for b in seen["plan"].buckets for p in b.params}
    local = 4 * sum(seen["local"][n] for n in params if params[n].sharded)
    sent = [size for name, size in seen["sent"] if name == "start_gather"]
    assert local < sum(sent) <= 2 * local + 2 * 4 * seen["local"]["embed.weight"]
    reduced = sum(size for name, size in seen["sent"] if name == "start_reduce")
    assert reduced == 4 * sum(p.elements for p in params.values())
