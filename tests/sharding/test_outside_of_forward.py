"""The examples of docs/guide/parameters.md run as they stand, and compute what plain PyTorch does."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toy import VOCABULARY, build, differing, full

import zerograph
from zerograph.core.errors import ShardingError, UnsupportedError

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "parameters.md"
NORMS, WHOLE, PENALTY, HEAD, VECTOR, AVERAGE, LISTED, TARGET = (
    part.split("```")[0] for part in PAGE.read_text().split("```python")[1:]
)


def names() -> dict[str, Any]:
    """What the page's code is given."""
    tools = {"AveragedModel": AveragedModel, "get_ema_multi_avg_fn": get_ema_multi_avg_fn, "copy": copy}
    return tools | {"torch": torch, "zerograph": zerograph, "DTensor": DTensor, "cross_entropy": cross_entropy}


def batches(rank: int, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCABULARY, (8,), generator=generator).chunk(2)[rank] for _ in range(steps)]


def plainly(average_too: bool) -> tuple[nn.Module, Any]:
    """The page's loss, or its loop of averages, in one process."""
    model = build()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for pair in zip(batches(0, 3), batches(1, 3), strict=True):
        loss = cross_entropy(model(torch.cat(pair)), torch.cat(pair))
        if not average_too:
            (loss + 0.1 * sum(p.square().sum() for p in model.parameters())).backward()
            return model, None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return model, average


def _page(stage: int) -> None:
    model, scope = build(), names()
    backend = zerograph.backend(stage=stage, compute="eager")
    model.compile(backend=backend)
    scope |= {"model": model, "backend": backend}

    scope["target"] = copy.deepcopy(model)
    early_target = TARGET.replace("target = copy.deepcopy(model)", "")
    (tokens,) = batches(dist.get_rank(), 1)
    scope["loss"] = cross_entropy(model(tokens), tokens)
    exec(WHOLE + PENALTY, scope)
    scope["loss"].backward()
    reference, _ = plainly(average_too=False)
    for name, param in reference.named_parameters():
        grad = model.get_parameter(name).grad
        assert (grad is None) == (param.grad is None), name
        if grad is not None:
            torch.testing.assert_close(scope["whole"](grad), param.grad, msg=lambda m, n=name: f"{n}: {m}")

    exec(NORMS, scope)
    assert scope["norms"].gradient == pytest.approx(
        nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None]).item(), rel=1e-5
    )
    assert scope["mean"] == pytest.approx(reference.down.weight.mean().item(), rel=1e-5)
    exec(early_target, scope)
    assert differing(full(scope["target"]), full(model)) == []
    before = full(model)
    exec(VECTOR, scope)
    for name, param in model.named_parameters():
        assert torch.equal(scope["whole"](param.detach()), before[name] * 0.5), name


def _head(stage: int) -> None:
    model, plain = build(), build()
    model.compile(backend=zerograph.backend(stage=stage, compute="eager"))
    (tokens,) = batches(dist.get_rank(), 1)
    model(tokens)
    scope = names() | {"model": model, "hidden": model.embed(tokens), "tokens": tokens}
    exec(HEAD, scope)
    scope["loss"].backward()
    every = torch.cat([batches(rank, 1)[0] for rank in range(2)])
    cross_entropy(plain.embed(every) @ plain.head.weight.T, every).backward()
    torch.testing.assert_close(model.head.weight.grad.full_tensor(), plain.head.weight.grad)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_page_on_losses_outside(stage: int) -> None:
    run(2, _head, stage)


class Returned(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.net(tokens), tokens)


def _penalty_on_a_returned_loss() -> None:
    model = Returned()
    model.compile(backend=zerograph.backend(stage=3, compute="eager"))
    (tokens,) = batches(dist.get_rank(), 1)
    scope = names() | {"model": model.net}
    exec(WHOLE, scope)
    for mixed in (True, False):  # training goes on behind the error
        model.zero_grad()
        scope["loss"] = model(tokens)
        if mixed:
            loss = scope["loss"] + 0.1 * sum(p.square().sum() for p in model.parameters())
            with pytest.raises(UnsupportedError, match=r"combined with sharded parameters outside of forward"):
                loss.backward()
        else:
            exec(PENALTY, scope)
            scope["loss"].backward()
    reference, _ = plainly(average_too=False)
    for name, param in reference.named_parameters():
        grad = model.net.get_parameter(name).grad
        assert param.grad is None or torch.allclose(scope["whole"](grad), param.grad, rtol=1e-4, atol=1e-6), name


def test_a_penalty_on_a_returned_loss_is_refused_until_its_numbers_are_whole() -> None:
    run(2, _penalty_on_a_returned_loss)


def _assigned() -> None:
    model = build()
    model.compile(backend=zerograph.backend(stage=3, compute="eager"))
    (tokens,) = batches(dist.get_rank(), 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tokens).sum().backward()
    for value in (torch.zeros(8, 4), model.up.weight * 0.5):  # before the first step, and later
        before = full(model)
        model.up.weight.data = value
        with pytest.raises(ShardingError, match=r"\.data of a parameter of shape \[8, 4\] was assigned"):
            optimizer.step()
        assert differing(full(model), before) == []
        optimizer.step()  # it is told once
    model.up.weight.data = torch.zeros(8, 4)
    model(tokens[:1]).sum().backward()  # compiled for another batch in between
    with pytest.raises(ShardingError, match=r"\.data of a parameter of shape \[8, 4\] was assigned"):
        optimizer.step()
    for _ in range(20):  # rows that are made where others were freed are not those
        model.double().float()
        optimizer.step()
    with torch.no_grad():
        model.up.weight.data.mul_(2)
        model.up.weight.copy_(model.up.weight * 2)
    optimizer.step()


def test_assigned_data_is_refused_by_the_next_step() -> None:
    run(2, _assigned)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_page(stage: int) -> None:
    run(2, _page, stage)


def _averages() -> None:
    model = build()
    model.compile(backend=zerograph.backend(stage=3, compute="eager"))
    tokens = batches(dist.get_rank(), 3)
    scope = names() | {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    scope["data"] = [(t, t) for t in tokens]
    exec(AVERAGE, scope)  # made before the first call
    _, reference = plainly(average_too=True)
    ours = full(scope["average"])
    for name, value in full(reference).items():
        torch.testing.assert_close(ours[name], value, msg=lambda m, n=name: f"{n}: {m}")
    scope["data"] = scope["data"][:1]
    exec(AVERAGE, scope)  # made after it
    assert differing(full(scope["average"].module), full(model)) == []


def test_the_page_on_averages() -> None:
    run(2, _averages)


class Listed:
    """As diffusers' ``EMAModel``, which keeps tensors and no module."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.shadows = [2 * p.detach() for p in parameters]

    def store(self, parameters: Iterable[nn.Parameter]) -> None:
        self.stored = [p.detach().cpu().clone() for p in parameters]

    def copy_to(self, parameters: Iterable[nn.Parameter]) -> None:
        self._copy(self.shadows, parameters)

    def restore(self, parameters: Iterable[nn.Parameter]) -> None:
        self._copy(self.stored, parameters)

    def _copy(self, values: Iterable[torch.Tensor], parameters: Iterable[nn.Parameter]) -> None:
        for value, param in zip(values, parameters, strict=True):
            param.data.copy_(value.to(param.device).data)


def _averages_in_a_list(path: str) -> None:
    model = zerograph.shard(build(), zerograph.backend(stage=3, compute="eager"))
    before = full(model)
    scope = names() | {"unet": model, "ema": Listed(model.parameters())}
    exec(LISTED.replace("unet_ema.safetensors", path), scope)
    assert differing(full(model), before) == []
    assert torch.equal(load_file(path)["up.weight"], 2 * before["up.weight"])


def test_the_page_on_averages_in_a_list(tmp_path: Path) -> None:
    run(2, _averages_in_a_list, str(tmp_path / "ema.safetensors"))


CHANGES = {
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    "weight_norm": parametrizations.weight_norm,
    "the older weight_norm": nn.utils.weight_norm,
    "delete": lambda layer: delattr(layer, "weight"),
    "replace": lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(4, 4))),
    "rename": lambda layer: layer.register_parameter("weight_orig", layer.get_parameter("weight")),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("change", list(CHANGES))
def test_what_takes_a_parameter_is_refused(change: str) -> None:
    layer = zerograph.shard(nn.Linear(4, 4), zerograph.backend(dtype=torch.float32))
    with pytest.raises(ShardingError, match=r"parameter weight .*is sharded and cannot be (kept as|removed|replaced)"):
        CHANGES[change](layer)
