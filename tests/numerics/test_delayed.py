"""Updates that programs see one step later (``delayed=True``) equal a plain loop that applies each step's gradients one
step later, to the bit.

They are made by ``optim/delayed.py``; who settles them finds them through ``runtime/delayed.py``.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics.compare import full
from numerics.test_offload import BEHIND, HOST, OFF, Net, Run, _same
from ranks import run
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.nn import functional as F
from torch.optim import Optimizer

import zerograph
from zerograph.optim import host
from zerograph.runtime.torch_private import local_tensor
from zerograph.sharding.files.export import unique_tensors

Make = Callable[..., Optimizer]
BF16 = {"dtype": torch.bfloat16}


class PlainLoop:
    """An optimizer's steps, each by the gradients, learning rates and arguments of the one before."""

    def __init__(self, optimizer: Any, warmup: int) -> None:
        self.optimizer, self.left, self.held = optimizer, warmup, None
        self.param_groups = optimizer.param_groups

    def step(self, **options: Any) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        self.settle()
        if self.left:
            self.left -= 1
            self.optimizer.step(**options)
            return
        self.held = [(p, p.grad) for p in params], [float(g["lr"]) for g in self.param_groups], options
        for p in params:
            p.grad = None

    def settle(self) -> None:
        held, self.held = self.held, None
        if held is None:
            return
        grads, rates, options = held
        now = [p.grad for p, _ in grads], [g["lr"] for g in self.param_groups]
        for p, grad in grads:
            p.grad = grad
        self._set_rates(rates)
        self.optimizer.step(**options)
        self._set_rates(now[1])
        for (p, _), grad in zip(grads, now[0], strict=True):
            p.grad = grad

    def _set_rates(self, rates: list[Any]) -> None:
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate

    def zero_grad(self, *args: Any) -> None:
        self.optimizer.zero_grad(*args)

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return self.optimizer.state_dict()

    @property
    def skipped(self) -> int:
        return self.optimizer.skipped


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    return zerograph.optim.AdamW(model.parameters(), lr=1e-2, **options)


def groups(model: nn.Module, **options: Any) -> Optimizer:
    """Parameters of one bucket in two groups, interleaved; one group has a learning rate that is a tensor."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return zerograph.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": torch.tensor(3e-3)}],
        lr=1e-2, amsgrad=True, **options,
    )  # fmt: skip


def mastered(model: nn.Module, **options: Any) -> Optimizer:
    return adamw(model, master=torch.float32, **options)


def momentum(model: nn.Module, **options: Any) -> Optimizer:
    return zerograph.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5, **options)


def lion(model: nn.Module, **options: Any) -> Optimizer:
    return zerograph.optim.Lion(model.parameters(), lr=1e-3, **options)


def adagrad(model: nn.Module, **options: Any) -> Optimizer:
    return zerograph.optim.Adagrad(model.parameters(), lr=0.1, **options)


def _both(make: Make, trains: Callable[[Run], None], warmup: int, options: dict[str, Any]) -> Run:
    """Train by a plain loop in one memory, and delayed with ``options``; returns the latter."""
    here = {key: value for key, value in options.items() if key in ("stage", "dtype", "model_dtype")}
    plain, late = (
        Run(make, **here),
        Run(partial(make, delayed=True, warmup=warmup), **{**(HOST if "tier" not in options else {}), **options}),
    )
    plain.optimizer = PlainLoop(plain.optimizer, warmup)  # type: ignore[assignment]
    for training in (plain, late):
        trains(training)
    for training in (plain, late):
        training.optimizer.settle()  # type: ignore[attr-defined]
    _same(plain.result(), late.result())
    return late


def _evaluates(training: Run) -> None:
    """What an evaluation computes is compared as a loss is."""
    if isinstance(training.optimizer, PlainLoop):
        training.optimizer.settle()
    training.model.eval()
    with torch.inference_mode():
        training.losses.append(training.compiled(torch.zeros(2, 8, dtype=torch.long)).item())
    training.model.train()


def _trains(training: Run) -> None:
    """Steps within and behind the warm-up, clipped and skipped ones, micro-batches, and evaluations in between."""
    training.steps(5)
    for _ in range(2):
        training.backward()
        training.steps(1, clip=0.1)
    _evaluates(training)
    training.steps(2)
    training.backward(float("inf"))
    training.optimizer.step()
    training.optimizer.zero_grad(False)
    training.steps(2, grad_scale=2.0)
    assert training.optimizer.skipped == 1  # type: ignore[attr-defined]
    with training.backend.no_sync():
        training.backward()
    training.steps(1)
    _evaluates(training)
    training.steps(1)


def _equal(make: Make, warmup: int, options: dict[str, Any]) -> set[str]:
    """Names of the parameters that were updated beside programs."""
    training = _both(make, _trains, warmup, options)
    optimizer: Any = training.optimizer
    moving = optimizer.late._late_params()
    return {name for name, p in training.model.named_parameters() if p.requires_grad and id(p) not in moving}


@pytest.mark.parametrize(
    ("world_size", "make", "options"),
    [
        (1, adamw, {"stage": 1}),
        (2, adamw, {"stage": 1}),
        (2, lion, {"stage": 2, "offload": "gradients"}),
        (1, groups, {"stage": 2, **BF16}),
        (2, groups, {"stage": 3, "offload": "gradients", **BF16}),
        (1, momentum, {"stage": 3}),
        (2, adagrad, {"stage": 3, **BF16}),
        (2, mastered, {"stage": 3, "model_dtype": torch.bfloat16}),
        (2, groups, {"stage": 3, "offload": "parameters", **BF16}),
        (1, adamw, {"stage": 3, "offload": "parameters", **BF16}),
    ],
)
def test_training_equals_a_plain_loop_to_the_bit(world_size: int, make: Make, options: dict[str, Any]) -> None:
    for behind in run(world_size, _equal, make, 3, options):
        assert behind <= {"few", "scale"}  # which every rank holds whole


NVME: list[tuple[int, Make, dict[str, Any]]] = [
    (1, adamw, {**OFF, "stage": 1, **BF16}),
    (2, groups, {**OFF, "stage": 3, **BF16}),
    (2, lion, {**OFF, "stage": 2, **BF16}),
    (2, mastered, {**BEHIND, "stage": 3, "model_dtype": torch.bfloat16}),
    (1, adamw, {**BEHIND, "stage": 3}),
    (2, groups, {**BEHIND, "stage": 3}),
    (2, adagrad, {**BEHIND, "stage": 2, **BF16}),
]


@pytest.mark.parametrize(("world_size", "make", "options"), NVME)
def test_states_on_nvme_are_updated_beside_the_next_step(
    world_size: int, make: Make, options: dict[str, Any], tmp_path: Path
) -> None:
    for behind in run(world_size, _equal, make, 3, {**options, "path": str(tmp_path)}):
        assert behind <= {"few", "scale"}


def _scheduled(training: Run) -> None:
    inner = getattr(training.optimizer, "optimizer", training.optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1.0 / (1 + step))
    for _ in range(6):
        training.steps(1)
        scheduler.step()


def _equal_with_a_scheduler() -> None:
    for make in (adamw, groups):
        _both(make, _scheduled, 1, {"stage": 3})


def test_schedulers_set_rates_for_the_next_step() -> None:
    run(2, _equal_with_a_scheduler)


def _plain_torch() -> None:
    """Beside a loop with nothing of ours."""
    late = Run(partial(adamw, delayed=True, warmup=2), **HOST, stage=2)
    torch.manual_seed(0)
    model = Run.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained = [p for p in model.parameters() if p.requires_grad]
    batches, losses, held = torch.Generator().manual_seed(0), [], None
    for step in range(8):
        loss = model(torch.randint(0, 37, (3, 8), generator=batches))
        grads = list(torch.autograd.grad(loss, trained))
        losses.append(loss.item())
        if step >= 2:
            held, grads = grads, held
        for p, grad in zip(trained, grads or [], strict=bool(grads)):
            p.grad = grad
        if grads:
            optimizer.step()
    late.steps(8)
    torch.testing.assert_close(late.losses, losses, rtol=1e-5, atol=1e-6)
    ordinary = Run(adamw, **HOST, stage=2)
    ordinary.steps(8)
    assert ordinary.losses[:3] == late.losses[:3] and all(
        a != b for a, b in zip(ordinary.losses[3:], late.losses[3:], strict=True)
    )


def test_it_is_the_delay_of_the_paper() -> None:
    run(1, _plain_torch)


@contextmanager
def _held_up() -> Iterator[threading.Event]:
    """Inside, an update waits until the event is set."""
    gate, update = threading.Event(), host.update_arrived

    def waits(*args: Any) -> None:
        assert gate.wait(60)
        update(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "update_arrived", waits)
        yield gate


def _blocked(placement: dict[str, Any]) -> None:
    """Steps and programs return while an update runs."""
    training = Run(partial(groups, delayed=True), **placement, stage=3, dtype=torch.bfloat16)
    training.steps(2)
    with _held_up() as gate:
        training.steps(1)
        training.backward()
        training.optimizer.zero_grad()
        training.backward()
        assert not gate.is_set()
        gate.set()
        training.optimizer.step()


@pytest.mark.parametrize("placement", [HOST, OFF, BEHIND], ids=["host", "nvme", "nvme behind a host"])
def test_nothing_waits_for_an_update_but_the_next_step(placement: dict[str, Any], tmp_path: Path) -> None:
    run(2, _blocked, placement if placement is HOST else {**placement, "path": str(tmp_path)})


def _two_rooms() -> None:
    """Gradients of one step lie where those of the last but one lay."""
    training = Run(partial(adamw, delayed=True), **HOST, stage=3)
    seen = []
    for _ in range(6):
        training.backward()
        seen.append(local_tensor(training.model.layers[0][0].weight.grad).data_ptr())  # type: ignore[index, union-attr]
        training.optimizer.step()
    assert len(set(seen)) == 2 and seen[2:] == seen[:-2]


def test_memory_of_gradients_is_used_in_turn() -> None:
    run(1, _two_rooms)


def _goes_on(warmup: int, before: int) -> None:
    """A checkpoint is taken in the middle: the run that goes on and the one that begins with it are the same."""
    first, second = (Run(partial(groups, delayed=True, warmup=n), **HOST, stage=3) for n in (warmup, 40))
    first.steps(before)
    kept = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict()))
    model, optimizer = copy.deepcopy(get_state_dict(first.model, first.optimizer))
    assert kept[1]["param_groups"][0]["warmup"] == max(0, warmup - before)
    second.steps(1)
    second.model.load_state_dict(kept[0])
    second.optimizer.load_state_dict(kept[1])
    third = Run(partial(groups, delayed=True, warmup=40), **HOST, stage=3)
    third.steps(1)
    set_state_dict(third.model, third.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    batch = first.batches.get_state()
    for training in (first, second, third):
        training.losses = []
        training.batches.set_state(batch)
        training.steps(6)
    _same(first.result(), second.result())
    _same(first.result(), third.result())


@pytest.mark.parametrize(("warmup", "before"), [(0, 3), (4, 2)])
def test_a_run_goes_on_from_a_checkpoint(warmup: int, before: int) -> None:
    run(2, _goes_on, warmup, before)


def _rolls_back() -> None:
    """Of whole values from rank 0, which torch writes into parameters itself, while an update runs."""
    training = Run(partial(adamw, delayed=True), **HOST, stage=3)
    whole = StateDictOptions(full_state_dict=True)
    training.steps(2)
    good = copy.deepcopy(get_model_state_dict(training.model, options=whole))
    before = dict(good)  # the dictionary that is loaded gets shards
    with _held_up() as gate:
        training.steps(1)
        threading.Timer(0.3, gate.set).start()
        set_model_state_dict(
            training.model, good, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        )
    for name, value in get_model_state_dict(training.model, options=whole).items():
        assert torch.equal(value, before[name]), name
    training.steps(2)


def test_a_checkpoint_that_one_rank_has_read_is_loaded_behind_an_update() -> None:
    run(2, _rolls_back)


def _looks(training: Run, look: Callable[[Run], Any]) -> None:
    if isinstance(training.optimizer, PlainLoop):
        training.optimizer.settle()
    found = look(training)
    training.losses += [float(full(value.detach()).double().sum()) for value in found]


def _weights(training: Run) -> Any:
    return list(training.model.parameters())


def _settles(training: Run) -> None:
    """Of everything that looks at parameters: it sees those behind the last step, and so does the next one."""

    def settle(training: Run) -> Any:
        training.optimizer.settle()  # type: ignore[attr-defined]
        return _weights(training)

    def gathers(training: Run) -> Any:
        with zerograph.gathered(training.model) as model:
            return [p.clone() for p in model.parameters()]

    def changes(training: Run) -> Any:
        with torch.no_grad(), zerograph.gathered(training.model, writeback=True):
            training.model.norm.weight.add_(0.25)  # type: ignore[operator]
        return _weights(training)

    def exports(training: Run) -> Any:
        return list(unique_tensors(training.model)[0].values())

    def norms(training: Run) -> Any:
        return list(map(torch.tensor, zerograph.norms(training.model).weights.values()))

    def refreshes(training: Run) -> Any:
        training.backend.refresh()
        return _weights(training)

    def steps_otherwise(training: Run) -> Any:
        torch.optim.SGD(training.model.parameters(), lr=0.01).step()
        training.optimizer.zero_grad()
        return _weights(training)

    def adds(training: Run) -> Any:
        group = {"params": [nn.Parameter(torch.ones(3))], "lr": 0.5}
        getattr(training.optimizer, "optimizer", training.optimizer).add_param_group(group)
        return _weights(training)

    def copies(training: Run) -> Any:
        return list(copy.deepcopy(training.model).parameters())

    def loads(training: Run) -> Any:
        training.model.load_state_dict({k: full(v) * 0.5 for k, v in training.model.state_dict().items()})
        return _weights(training)

    looks = settle, changes, gathers, steps_otherwise, exports, norms, refreshes, adds, copies, loads
    for times, look in enumerate(looks):
        training.steps(2)
        if times % 2:  # between a backward and its step
            training.backward()
            _looks(training, look)
            if look is not steps_otherwise:
                training.optimizer.step()
                training.optimizer.zero_grad()
        else:
            _looks(training, look)
    training.steps(2)


def _looked_at(options: dict[str, Any]) -> None:
    _both(adamw, _settles, 1, options)


@pytest.mark.parametrize("options", [{"stage": 3}, {"stage": 3, "offload": "parameters", **BF16}])
def test_whoever_looks_at_parameters_sees_those_behind_the_last_step(options: dict[str, Any]) -> None:
    run(2, _looked_at, options)


def _evaluates_between_micro_batches(training: Run) -> None:
    """At stage 2 buckets stay whole while gradients are held back, and are gathered anew behind the evaluation."""
    for _ in range(3):
        with training.backend.no_sync():
            training.backward()
            _evaluates(training)
            training.backward()
        training.steps(1)


def _settles_amid_a_step() -> None:
    late = [Run(partial(adamw, delayed=True), **HOST, stage=stage) for stage in (2, 3)]
    for training in late:
        _evaluates_between_micro_batches(training)
    _same(late[0].result(), late[1].result())


@pytest.mark.slow
def test_an_evaluation_between_micro_batches_settles() -> None:
    run(2, _settles_amid_a_step)


class Parts(Net):
    """One of its frames has frozen parameters alone, and a layer is never compiled."""

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            start = self.frozen(torch.ones(8, 40))
        torch._dynamo.graph_break()
        x = self.embedding(tokens) + start
        for layer in self.layers:
            x = x + layer(x)
        x = self.frozen(self._normalized(x) * self.few) * self.scale
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())

    @torch.compiler.disable
    def _normalized(self, x: Tensor) -> Tensor:
        return self.norm(x)  # type: ignore[no-any-return]


class InParts(Run):
    net = Parts


def _equal_in_parts() -> set[str]:
    plain, late = InParts(adamw, stage=3), InParts(partial(adamw, delayed=True), stage=3, **HOST)
    plain.optimizer = PlainLoop(plain.optimizer, 0)  # type: ignore[assignment]
    for training in (plain, late):
        training.steps(5)
        training.optimizer.settle()  # type: ignore[attr-defined]
    _same(plain.result(), late.result())
    moving = late.optimizer.late._late_params()  # type: ignore[attr-defined]
    return {name for name, p in late.model.named_parameters() if p.requires_grad and id(p) not in moving}


@pytest.mark.slow
def test_what_is_read_uncompiled_is_updated_in_steps() -> None:
    for behind in run(2, _equal_in_parts):
        assert behind == {"few", "scale", "norm.weight", "norm.bias"}


def _two_optimizers() -> None:
    """Each delays what it has, and hides nothing of the other's."""

    def trains(training: Run, delayed: bool) -> None:
        matrices = [p for p in training.model.parameters() if p.ndim > 1 and p.requires_grad]
        others = [p for p in training.model.parameters() if p.ndim <= 1 and p.requires_grad]
        options: dict[str, Any] = {"delayed": True} if delayed else {}
        made: list[Any] = [
            zerograph.optim.AdamW(matrices, lr=1e-2, **options), zerograph.optim.SGD(others, lr=0.1, **options),
        ]  # fmt: skip
        optimizers = made if delayed else [PlainLoop(each, 0) for each in made]
        for _ in range(5):
            training.backward()
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.settle()

    here, there = Run(adamw, stage=3), Run(adamw, stage=3, **HOST)
    trains(here, False)
    trains(there, True)
    assert here.losses == there.losses
    for a, b in zip(here.model.parameters(), there.model.parameters(), strict=True):
        assert torch.equal(full(a), full(b))


def test_two_optimizers_are_delayed_side_by_side() -> None:
    run(2, _two_optimizers)


def _scaled(scaler: torch.amp.GradScaler | None) -> Run:
    training = Run(partial(adamw, delayed=True), **HOST, stage=3)
    for _ in range(4):
        if scaler is None:
            training.backward(2.0**10)
            training.optimizer.step(grad_scale=2.0**10)  # type: ignore[call-arg]
        else:
            loss = training.compiled(training.tokens())
            scaler.scale(loss).backward()
            training.losses.append(loss.item())
            scaler.step(training.optimizer)
            scaler.update()
    return training


def _equal_under_a_scaler() -> None:
    _same(_scaled(torch.amp.GradScaler("cpu", init_scale=2.0**10)).result(), _scaled(None).result())


def test_a_gradient_scaler_scales_at_the_step() -> None:
    run(1, _equal_under_a_scaler)
