"""The training loop stays PyTorch's: each way of writing one gives what it gives without ZeroGraph.

A scenario is a function of a :class:`Trainer` that trains and returns what it saw; it runs in plain PyTorch on the
whole batch and at every stage on each rank's rows, and all must agree.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numerics.compare import ALL, Result, check, full, full_values, mean_over_ranks, mine, seeded
from ranks import run
from torch import Tensor, nn
from traced import TracedOnce

import zerograph


class Net(nn.Module):
    """Tokens to logits: an embedding, a block with a skip connection, a head whose rows do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 13)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        h = h + self.down(F.gelu(self.up(self.norm(h))))
        return self.head(h)


class Trainer:
    """One model, plain (stage None) or compiled, and this rank's part of the data."""

    rows = 4

    def __init__(self, stage: int | None, **options: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.module = Net()
        self.stage, self.plain = stage, stage is None
        self.backend: Any = None
        if not self.plain:
            self.backend = zerograph.backend(stage=stage, **{"compute": "eager", "bucket_size": "1KB"} | options)

    @functools.cached_property
    def model(self) -> Callable[..., Tensor]:
        """Compiled as any model is at stage 3; at others, which differ behind Dynamo, traced once for all trainers."""
        if self.stage == 3:
            return torch.compile(self.module, backend=self.backend)
        changed = "forward" in vars(self.module)
        return self.module if self.plain else TracedOnce(self.module, self.backend, changed)

    def batch(self, seed: int) -> Tensor:
        ids = torch.randint(0, 13, (self.rows * dist.get_world_size(), 5), generator=seeded(seed))
        return ids if self.plain else mine([ids])[0]

    def loss(self, seed: int) -> Tensor:
        ids = self.batch(seed)
        return F.cross_entropy(self.model(ids).flatten(0, 1).float(), (ids.flatten() + 1) % 13)

    def mean(self, value: Tensor) -> float:
        return (value.detach() if self.plain else mean_over_ranks(value)).item()

    def train(self, optimizer: torch.optim.Optimizer, steps: int = 3, start: int = 0) -> list[float]:
        losses = []
        for step in range(start, start + steps):
            loss = self.loss(step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(self.mean(loss))
        return losses


def sgd(t: Trainer, lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD(t.module.parameters(), lr=lr)


def accumulation(t: Trainer) -> list[float]:
    return _accumulate(t, no_sync=False)


def accumulation_no_sync(t: Trainer) -> list[float]:
    return _accumulate(t, no_sync=True)


def _accumulate(t: Trainer, no_sync: bool) -> list[float]:
    optimizer, losses = sgd(t), []
    for step in range(3):
        for micro in range(3):
            loss = t.loss(10 * step + micro) / 3
            if no_sync and micro < 2 and not t.plain:
                with t.backend.no_sync():
                    loss.backward()
            else:
                loss.backward()
            losses.append(t.mean(loss))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
    return losses


def _held_back(t: Trainer, seed: int) -> None:
    with contextlib.nullcontext() if t.plain else t.backend.no_sync():
        t.loss(seed).backward()


def no_sync_around_the_forward(t: Trainer) -> list[float]:
    """As DDP's documentation shows it: forward and backward inside."""
    optimizer, losses = sgd(t), []
    for step in range(2):
        _held_back(t, 10 * step)
        losses += t.train(optimizer, 1, 10 * step + 1)
    return losses


def gradients_of_inputs_beside_no_sync(t: Trainer) -> list[float]:
    """``torch.autograd.grad`` for inputs holds nothing back, and takes nothing that is held."""
    forward = t.module.forward
    t.module.forward = lambda ids, x: forward(ids) * x  # type: ignore[assignment]

    def backward(seed: int) -> float:
        ids = t.batch(seed)
        x = torch.ones(len(ids), 1, 1, requires_grad=True)
        out = t.model(ids, x)
        (weights,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        loss = F.cross_entropy((out * weights.tanh()).flatten(0, 1), (ids.flatten() + 1) % 13)
        loss.backward()
        return t.mean(loss)

    optimizer, losses = sgd(t), []
    for step in range(2):
        with contextlib.nullcontext() if t.plain else t.backend.no_sync():
            losses.append(backward(10 * step))
        losses.append(backward(10 * step + 1))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def no_sync_then_dropped(t: Trainer) -> list[float]:
    """Gradients held back and then zeroed must not come back."""
    optimizer = sgd(t)
    losses = t.train(optimizer, 1)
    for to_none in (True, False):
        _held_back(t, 7)
        optimizer.zero_grad(to_none)
        losses += t.train(optimizer, 1, 1 + to_none)
    return losses


def clip_torch(t: Trainer) -> list[float]:
    return _clip(t, torch.nn.utils.clip_grad_norm_)


def clip_fast(t: Trainer) -> list[float]:
    return _clip(t, torch.nn.utils.clip_grad_norm_ if t.plain else zerograph.clip_grad_norm_)


def _clip(t: Trainer, clip: Callable[..., Tensor]) -> list[float]:
    """The list of parameters is taken before the first call, while they are plain."""
    params = list(t.module.parameters())
    optimizer, losses = torch.optim.SGD(params, lr=0.5), []
    for step in range(3):
        loss = t.loss(step)
        loss.backward()
        norm = full(clip(params, 0.3))
        optimizer.step()
        optimizer.zero_grad()
        losses += [t.mean(loss), norm.item()]
    return losses


def clip_value(t: Trainer) -> list[float]:
    optimizer, losses = sgd(t), []
    for step in range(3):
        loss = t.loss(step)
        loss.backward()
        torch.nn.utils.clip_grad_value_(t.module.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(t.mean(loss))
    return losses


def schedulers(t: Trainer) -> list[float]:
    optimizer = sgd(t)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    losses: list[float] = []
    for step in range(4):
        losses += t.train(optimizer, 1, step)
        warmup.step()
        cosine.step()
        plateau.step(losses[-1])
        losses.append(optimizer.param_groups[0]["lr"])
    return losses


class Lion(torch.optim.Optimizer):
    """Elementwise, and written with ``p.data`` as much code on the web is."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                moment = self.state[p].setdefault("moment", torch.zeros_like(p.data))
                update = moment.mul(0.9).add(p.grad.data, alpha=0.1)
                p.data.add_(update / (update.abs() + 1e-3), alpha=-group["lr"])
                moment.mul_(0.99).add_(p.grad.data, alpha=0.01)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=True),
    "adamw for-loop": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-2, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-3),
    "lion": lambda p: Lion(p, lr=0.01),
}


def sgd_by_hand(t: Trainer) -> list[float]:
    """No optimizer: nothing tells that the shards have changed."""
    losses = []
    for step in range(3):
        loss = t.loss(step)
        loss.backward()
        with torch.no_grad():
            for p in t.module.parameters():
                p.data.add_(p.grad, alpha=-0.5)
                p.grad = None
        losses.append(t.mean(loss))
    return losses


def sgd_by_hand_keeping_gradients(t: Trainer) -> list[float]:
    """Gradients are zeroed in place before each backward, not after the update."""
    losses = []
    for step in range(3):
        for p in t.module.parameters():
            if p.grad is not None:
                p.grad.zero_()
        loss = t.loss(step)
        loss.backward()
        for p in t.module.parameters():
            p.data -= 0.5 * p.grad
        losses.append(t.mean(loss))
    return losses


def sgd_by_hand_in_place(t: Trainer) -> list[float]:
    losses = []
    for step in range(3):
        loss = t.loss(step)
        grads = torch.autograd.grad(loss, list(t.module.parameters())) if t.plain or step else None
        if grads is None:  # the parameters are replaced in the first call, before the list is taken above
            grads = torch.autograd.grad(loss, list(t.module.parameters()))
        with torch.no_grad():
            for p, grad in zip(t.module.parameters(), grads, strict=True):
                p.sub_(grad, alpha=0.5)
        losses.append(t.mean(loss))
    return losses


def zero_grad_both_ways(t: Trainer) -> list[float]:
    optimizer, losses = sgd(t), []
    for step in range(6):
        loss = t.loss(step)
        loss.backward()
        optimizer.step()
        if step % 3 == 0:
            t.module.zero_grad(set_to_none=False)
        elif step % 3 == 1:
            optimizer.zero_grad(set_to_none=False)
        else:
            t.module.zero_grad()
        losses.append(t.mean(loss))
    return losses


def evaluation_in_between(t: Trainer) -> list[float]:
    optimizer, losses = sgd(t), []
    for step in range(3):
        loss = t.loss(step)
        with torch.no_grad():  # between forward and backward
            losses.append(t.mean(t.loss(20)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        t.module.eval()
        with torch.no_grad():
            losses.append(t.mean(t.loss(21)))
        with torch.inference_mode():
            losses.append(t.mean(t.loss(22)))
        t.module.train()
        with torch.no_grad():
            losses.append(t.mean(F.cross_entropy(t.module(t.batch(23))[:, 0], t.batch(23)[:, 0])))
    return losses


def inference_mode_first(t: Trainer) -> list[float]:
    """The very first call, which shards the model, happens in inference mode."""
    optimizer = sgd(t)
    t.module.eval()
    with torch.inference_mode():
        losses = [t.mean(t.loss(22))]
    t.module.train()
    return losses + t.train(optimizer)


def ema_swap(t: Trainer) -> list[float]:
    optimizer = sgd(t)
    losses = t.train(optimizer, 1)
    average = [p.detach().clone() for p in t.module.parameters()]
    for step in range(1, 4):
        losses += t.train(optimizer, 1, step)
        for a, p in zip(average, t.module.parameters(), strict=True):
            a.lerp_(p.detach(), 0.1)
        backup = [p.detach().clone() for p in t.module.parameters()]
        for p, a in zip(t.module.parameters(), average, strict=True):
            p.data.copy_(a)
        t.module.eval()
        with torch.no_grad():
            losses.append(t.mean(t.loss(20)))
        losses.append(t.mean(t.loss(20)))  # with gradients recorded, so by the training program
        t.module.train()
        for p, b in zip(t.module.parameters(), backup, strict=True):
            p.data.copy_(b)
    return losses


def averaged_model(t: Trainer) -> list[float]:
    """torch.optim.swa_utils, on the sharded model."""
    optimizer = sgd(t)
    losses = t.train(optimizer, 1)
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    averaged = torch.optim.swa_utils.AveragedModel(t.module, multi_avg_fn=ema)
    for step in range(1, 3):
        losses += t.train(optimizer, 1, step)
        averaged.update_parameters(t.module)
        with torch.no_grad():
            losses.append(t.mean(averaged(t.batch(20)).square().mean()))
    return losses


def uncompiled_calls(t: Trainer) -> list[float]:
    """Training steps through the module itself, which runs eagerly on the same shards."""
    optimizer = sgd(t)
    losses = t.train(optimizer, 1)
    compiled, t.model = t.model, t.module
    losses += t.train(optimizer, 2, 1)
    t.model = compiled
    return losses + t.train(optimizer, 1, 3)


def growing_length(t: Trainer) -> list[float]:
    """Greedy generation, a token longer at each call."""
    optimizer = sgd(t)
    losses = t.train(optimizer, 2)
    t.module.eval()
    ids = torch.arange(2)[:, None]
    with torch.no_grad():
        for _ in range(12):
            ids = torch.cat([ids, t.model(ids)[:, -1:].argmax(-1)], 1)
    t.module.train()
    return losses + ids.flatten().tolist() + t.train(optimizer, 1, 2)


def optimizer_after_the_first_forward(t: Trainer) -> list[float]:
    with torch.no_grad():
        t.loss(0)
    return t.train(torch.optim.AdamW(t.module.parameters(), lr=0.01, eps=1e-3))


def optimizer_with_state_before_sharding(t: Trainer) -> list[float]:
    """Plain training first, on equal data, then the compiled model goes on with the optimizer's moments."""
    optimizer = torch.optim.AdamW(t.module.parameters(), lr=0.01, eps=1e-3)
    for step in range(2):
        t.module(torch.arange(10).view(2, 5) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return t.train(optimizer)


def parameter_groups_and_added_group(t: Trainer) -> list[float]:
    m = t.module
    optimizer = torch.optim.SGD([{"params": m.embed.parameters(), "lr": 0.1}, {"params": [m.up.weight]}], lr=0.5)
    losses = t.train(optimizer, 2)
    optimizer.add_param_group({"params": m.head.parameters(), "lr": 0.2})
    return losses + t.train(optimizer, 2, 2)


def progressive_unfreezing(t: Trainer) -> list[float]:
    t.module.requires_grad_(False)
    t.module.head.requires_grad_(True)
    optimizer = sgd(t)
    losses = t.train(optimizer, 2)
    t.module.up.requires_grad_(True)
    t.module.embed.requires_grad_(True)
    losses += t.train(optimizer, 2, 2)
    t.module.head.requires_grad_(False)
    return losses + t.train(optimizer, 2, 4)


def unfrozen_with_momentum_and_no_sync(t: Trainer) -> list[float]:
    t.module.embed.requires_grad_(False)
    optimizer = torch.optim.SGD(t.module.parameters(), lr=0.2, momentum=0.9)
    losses = t.train(optimizer, 2)
    t.module.embed.requires_grad_(True)
    _held_back(t, 7)
    return losses + t.train(optimizer, 2, 2)


def unfrozen_and_updated_by_hand(t: Trainer) -> list[float]:
    """A parameter that was frozen when the model was sharded, updated below every version counter."""
    t.module.requires_grad_(False)
    t.module.head.weight.requires_grad_(True)
    losses = t.train(torch.optim.SGD([t.module.get_parameter("head.weight")], lr=0.5), 1)
    t.module.requires_grad_(False)
    p = t.module.get_parameter("up.weight").requires_grad_(True)
    for step in range(1, 4):
        loss = t.loss(step)
        loss.backward()
        p.data.add_(p.grad, alpha=-0.5)
        p.grad = None
        losses.append(t.mean(loss))
    return losses


def load_state_dict_between_steps(t: Trainer) -> list[float]:
    """Full plain values from a plain model go in between steps; caches may not be stale."""
    optimizer = sgd(t)
    losses = t.train(optimizer, 1)
    torch.manual_seed(5)
    t.module.load_state_dict(Net().state_dict())
    return losses + t.train(optimizer, 2, 1)


SCENARIOS: list[Callable[[Trainer], list[float]]] = [
    accumulation, accumulation_no_sync, no_sync_around_the_forward, no_sync_then_dropped,
    gradients_of_inputs_beside_no_sync, clip_torch, clip_fast,
    clip_value, schedulers, sgd_by_hand, sgd_by_hand_keeping_gradients, sgd_by_hand_in_place, zero_grad_both_ways,
    evaluation_in_between, inference_mode_first, ema_swap, averaged_model,
    uncompiled_calls, growing_length, optimizer_after_the_first_forward, optimizer_with_state_before_sharding,
    parameter_groups_and_added_group, progressive_unfreezing, unfrozen_and_updated_by_hand,
    unfrozen_with_momentum_and_no_sync,
    load_state_dict_between_steps,
]  # fmt: skip


def _play(scenario: Callable[[Trainer], list[float]], stages: tuple[int, ...]) -> dict[int | None, Result]:
    results = {}
    for stage in (None, *stages):
        trainer = Trainer(stage)
        losses = scenario(trainer)
        results[stage] = Result(losses, full_values(trainer.module))
    return results


GRADIENTS_ARE_HELD = (
    accumulation_no_sync, no_sync_around_the_forward, no_sync_then_dropped, unfrozen_with_momentum_and_no_sync,
    gradients_of_inputs_beside_no_sync, clip_fast,
)  # fmt: skip
VALUES_ARE_CHANGED = (sgd_by_hand, sgd_by_hand_in_place, ema_swap, load_state_dict_between_steps, accumulation)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_loop(scenario: Callable[[Trainer], list[float]]) -> None:
    stages: tuple[int, ...] = (3,)  # in most, nothing depends on when parameters are whole
    if scenario in GRADIENTS_ARE_HELD:  # stage 2 reduces as stage 1 does
        stages = ALL if scenario is accumulation_no_sync else (0, 1, 3)
    elif scenario in VALUES_ARE_CHANGED:
        stages = (1, 3)
    for results in run(2, _play, scenario, stages):
        check(results)


def _optimizers() -> dict[str, dict[int | None, Result]]:
    results: dict[str, dict[int | None, Result]] = {name: {} for name in OPTIMIZERS}
    for stage in (None, 1, 3):
        trainer = Trainer(stage)
        for name, make in OPTIMIZERS.items():
            torch.manual_seed(0)
            trainer.module.load_state_dict(Net().state_dict())
            losses = trainer.train(make(trainer.module.parameters()))
            results[name][stage] = Result(losses, full_values(trainer.module))
    return results


def test_elementwise_optimizers() -> None:
    for name, results in run(2, _optimizers)[0].items():
        try:
            check(results, rel=2e-5, atol=2e-5)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


# Precision.


def _scaler(stage: int | None) -> tuple[list[float], dict[str, Tensor]]:
    """One gradient element overflows in step 1, on the rank that holds it (at stage 0 all do): nobody may step."""
    t = Trainer(stage)
    poisoned = stage in (None, 0) or dist.get_rank() == 0
    optimizer = sgd(t, 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    losses = []
    for step in range(5):
        loss = t.loss(step)
        if step == 1 and poisoned:
            hook = next(t.module.parameters()).register_hook(_one_infinity)
        scaler.scale(loss).backward()
        if step == 1 and poisoned:
            hook.remove()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(t.module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses += [t.mean(loss), scaler.get_scale()]
    return losses, full_values(t.module)


def _one_infinity(grad: Tensor) -> Tensor:
    grad = grad.clone()
    (grad.to_local() if hasattr(grad, "to_local") else grad)[0, 0] = float("inf")
    return grad


def _scalers() -> dict[int | None, Result]:
    return {stage: Result(*_scaler(stage)) for stage in (None, 0, 1, 3)}


def test_grad_scaler_skips_the_step_on_all_ranks() -> None:
    first, second = run(2, _scalers)
    for results in (first, second):
        check(results)
        assert results[None].losses[3] == 4.0, "the scale was halved once"


def _rounded(kind: str, stage: int | None) -> tuple[list[float], dict[str, Tensor]]:
    t = Trainer(stage, **({"dtype": torch.bfloat16} if kind == "dtype" else {}))
    if kind == "autocast":
        forward = t.module.forward

        def autocast_forward(ids: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return forward(ids)

        t.module.forward = autocast_forward
    losses = t.train(sgd(t), 4)
    return losses, full_values(t.module)


def _roundeds(kind: str) -> dict[int | None, Result]:
    return {stage: Result(*_rounded(kind, stage)) for stage in (None, 0, 1, 3)}


@pytest.mark.parametrize("kind", ["autocast", "dtype"])
def test_sixteen_bit_compute(kind: str) -> None:
    """bfloat16 has 8 bits of precision: losses within 1%, values within 0.02 of the truth in float32 (or autocast)."""
    results = run(2, _roundeds, kind)[0]
    check(results, rel=1e-2, atol=2e-2)
    assert all(value.dtype == torch.float32 for value in results[3].values.values())
