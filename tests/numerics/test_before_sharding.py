"""What ranks bring to the first call: gradients from before it, and models or settings that differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from numerics.compare import full, seeded
from ranks import refused, run
from torch import Tensor, nn

import zerograph
from zerograph.core.errors import ConfigError


class Net(nn.Module):
    def __init__(self, layers: int = 1, buffers: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        for i in range(buffers):
            self.register_buffer(f"buffer{i}", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _gradients_from_before(stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of an eager and a compiled backward together: ours, and the mean over ranks of plain ones."""
    torch.manual_seed(0)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 6, generator=seeded(dist.get_rank()))
    model(x).sum().backward()
    model.compile(backend=zerograph.backend(stage=stage, compute="eager"))
    for net in (model, plain, plain):
        net(x).sum().backward()
    for param in plain.parameters():
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()
    return ({name: full(p.grad) for name, p in model.named_parameters()},
            {name: p.grad for name, p in plain.named_parameters()})  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_from_before_the_first_call_are_averaged(stage: int) -> None:
    for ours, plain in run(2, _gradients_from_before, stage):
        torch.testing.assert_close(ours, plain)


def _states_from_before(stage: int | None, first: int) -> dict[str, Tensor]:
    """Parameters after an eager step on rank ``first``'s rows, and two more together; None is plain PyTorch."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
    x = [torch.randn(2, 6, generator=seeded(rank)) for rank in range(dist.get_world_size())]
    for _ in range(1 + first):  # so that the counts of steps differ too
        model(x[first]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if stage is not None:
        model.compile(backend=zerograph.backend(stage=stage, compute="eager"))
    for _ in range(2):
        (model(x[dist.get_rank()]) if stage is not None else model(torch.cat(x)) / len(x)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: full(p) for name, p in model.named_parameters()}


def _all_states_from_before() -> list[dict[str, Tensor]]:
    """At the stages that differ in what is whole: everything, and nothing but small parameters."""
    return [_states_from_before(stage, dist.get_rank()) for stage in (0, 3)] + [_states_from_before(None, 0)]


def test_optimizer_states_from_before_the_first_call_are_those_of_rank_0() -> None:
    for at_0, at_3, plain in run(2, _all_states_from_before):
        torch.testing.assert_close(at_0, plain)
        torch.testing.assert_close(at_3, plain)


def _first_call(mine: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    sizes, options = mine[dist.get_rank()]
    before = options.pop("before", "")
    model = Net(**sizes)
    if before == "frozen":
        model.layers[0].bias.requires_grad_(False)
    elif before:
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.zeros(2, 6)).sum().backward()
        if before == "step":
            optimizer.step()
            optimizer.zero_grad()
    model.compile(backend=zerograph.backend(compute="eager", **options))
    model(torch.zeros(2, 6))


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({}, {"stage": 0}, "rank 0 has stage=3, rank 1 has stage=0"),
        ({}, {"bucket_size": 64}, "rank 1 has bucket_size=64"),
        ({"layers": 2}, {}, "rank 1 has parameter layers.1.weight (6, 6) torch.float32"),
        ({"buffers": 1}, {}, "rank 0 has nothing more, rank 1 has buffer buffer0 (1,) torch.float32"),
        ({}, {"before": "step"}, "rank 1 has state exp_avg of layers.0.bias in Adam: (6,) torch.float32"),
        ({}, {"before": "backward"}, "rank 1 has parameter layers.0.weight (6, 6) torch.float32, with a gradient"),
        ({}, {"before": "frozen"}, "rank 1 has parameter layers.0.bias (6,) torch.float32, frozen"),
    ],
    ids=["stage", "bucket size", "layer", "buffer", "optimizer", "gradient", "frozen"],
)
def test_ranks_that_differ_all_get_an_error_before_anything_is_sharded(
    sizes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    for text in run(2, refused, _first_call, [({}, {}), (sizes, options)]):
        assert "CollectiveMismatch" in text and message in text


def _fused(make: str) -> None:
    model = Net()
    model.compile(backend=zerograph.backend(stage=3, compute="eager"))
    model(torch.zeros(2, 6)).sum().backward()
    getattr(torch.optim, make)(model.parameters(), lr=0.1, fused=True).step()


@pytest.mark.parametrize("make", ["SGD", "Adagrad"])
def test_fused_kernels_that_know_no_shards_are_refused(make: str) -> None:
    for text in run(2, refused, _fused, make):
        assert "fused=False" in text and "UnsupportedError" in text


def test_a_wrong_option_by_name_is_an_error_about_it() -> None:
    with pytest.raises(ConfigError, match="stage must be"):
        torch.compile(Net(), backend="zerograph", options={"stage": 7})(torch.zeros(2, 6))


class Nothing(nn.Module):
    """Its output does not depend on its input, so that its gradients are known while compiling."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * 0


def _constant_gradients(stage: int) -> list[float]:
    model = Nothing()
    model.compile(backend=zerograph.backend(stage=stage, compute="eager"))
    model(torch.ones(2, 6)).sum().backward()
    return [full(p.grad).abs().max().item() for p in model.parameters()]


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_that_are_constants_are_reduced_too(stage: int) -> None:
    assert run(2, _constant_gradients, stage) == [[0.0, 0.0]] * 2
