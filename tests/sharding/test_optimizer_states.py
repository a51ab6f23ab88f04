"""States from before sharding: described so that ranks can compare them, and rank 0's on all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zerograph.sharding.optimizer_states import early_states, share


def stepped(*params: nn.Parameter, kind: type = torch.optim.Adam) -> torch.optim.Optimizer:
    optimizer = kind(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def test_states_are_described_in_an_order_that_ranks_share() -> None:
    w, v, other = (nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (4,), (5,)))
    optimizer, of_others = stepped(v, w), stepped(other)
    optimizer.state[v]["note"] = "text"
    optimizer.state[v]["count"] = 3
    found = early_states({"w": w, "v": v}, [object(), optimizer, of_others])
    assert list(found) == [
        "state count of v in Adam: 3",
        "state exp_avg of v in Adam: (4,) torch.float32",
        "state exp_avg of w in Adam: (2, 3) torch.float32",
        "state exp_avg_sq of v in Adam: (4,) torch.float32",
        "state exp_avg_sq of w in Adam: (2, 3) torch.float32",
        "state note of v in Adam: str",
        "state step of v in Adam: () torch.float32",
        "state step of w in Adam: () torch.float32",
    ]
    assert found["state exp_avg of w in Adam: (2, 3) torch.float32"] is optimizer.state[w]["exp_avg"]


def test_two_optimizers_of_one_class_are_distinguished() -> None:
    w = nn.Parameter(torch.ones(2))
    found = early_states({"w": w}, [stepped(w, kind=torch.optim.Adagrad), stepped(w, kind=torch.optim.Adagrad)])
    assert list(found) == [
        "state step of w in Adagrad: () torch.float32",
        "state step of w in Adagrad: () torch.float32, again",
        "state sum of w in Adagrad: (2,) torch.float32",
        "state sum of w in Adagrad: (2,) torch.float32, again",
    ]


def _shared() -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn):
        value = torch.tensor([rank, 1 - rank, 1.0]).to(dtype)
        share([value], mesh)
        assert torch.equal(value.float(), torch.tensor([0.0, 1.0, 1.0])), dtype
    turned = torch.full((2, 3), float(rank)).t()
    share([turned], mesh)
    assert not turned.any() and not turned.is_contiguous()
    base = torch.full((1, 3), float(rank))
    share([base.expand(4, 3)], mesh)
    assert not base.any(), "what is shown several times is written once"
    share([torch.empty(0, 3)], mesh)
    states = {"tensor": torch.full((2,), float(rank)), "number": 3, "meta": torch.empty(2, device="meta")}
    share(states.values(), mesh)
    assert torch.equal(states["tensor"], torch.zeros(2))


def test_the_values_of_rank_0_on_every_rank() -> None:
    run(2, _shared)


def test_one_rank_shares_with_nobody() -> None:
    states = {"w": torch.ones(2)}
    share(states.values(), None)
    assert torch.equal(states["w"], torch.ones(2))
