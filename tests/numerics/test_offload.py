"""Training with optimizer states on the host or on NVMe equals training without, to the bit: losses, parameters and
states."""

from __future__ import annotations

import copy
import gc
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from numerics.compare import full
from ranks import refused, run
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F
from torch.optim import Optimizer
from traced import TracedOnce

import zerograph
from zerograph.core.errors import ConfigError, UnsupportedError
from zerograph.core.machine import machine_named
from zerograph.runtime.offload import slots
from zerograph.runtime.torch_private import local_tensor

OFF = {"offload": "optimizer", "tier": "nvme"}
HOST = {"offload": "optimizer", "tier": "host", "machine": replace(machine_named("cpu"), split=True)}
"""On a CPU whose host counts as another memory: what does not wait for a copy computes with not-a-number."""
BEHIND = {**HOST, "tier": "nvme"}
"""On NVMe behind that."""


class Net(nn.Module):
    """Uneven and empty shards, a tied, a frozen and a 0-d parameter, two layers that are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 40)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(40, 90), nn.GELU(), nn.Linear(90, 40)) for _ in range(2))
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        self.norm = nn.LayerNorm(40)
        self.few = nn.Parameter(torch.ones(1, 40))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(40, 37, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        x = self.norm(self.frozen(x) * self.few) * self.scale
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def adamw(model: nn.Module) -> Optimizer:
    return zerograph.optim.AdamW(model.parameters(), lr=1e-2)


def mastered(model: nn.Module) -> Optimizer:
    return zerograph.optim.AdamW(model.parameters(), lr=1e-2, master=torch.float32)


def groups(model: nn.Module) -> Optimizer:
    """Parameters of one bucket in two groups, interleaved."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return zerograph.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}], lr=1e-2, amsgrad=True
    )


def lion(model: nn.Module) -> Optimizer:
    return zerograph.optim.Lion(model.parameters(), lr=1e-3)


def momentum(model: nn.Module) -> Optimizer:
    return zerograph.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)


def adagrad(model: nn.Module) -> Optimizer:
    return zerograph.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.3)


def bf16_moments(model: nn.Module) -> Optimizer:
    return zerograph.optim.AdamW(model.parameters(), lr=1e-2, moments=torch.bfloat16)


def stock(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def stock_adagrad(model: nn.Module) -> Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.3)


def stock_sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


Trained = tuple[list[float], dict[str, Tensor], dict[int, dict[str, Any]]]


class Run:
    """One training that can be looked at in between."""

    net: type[nn.Module] = Net
    device = torch.device("cpu")

    def __init__(
        self, make: Callable[[nn.Module], Optimizer], model_dtype: torch.dtype | None = None, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = self.net().to(self.device, model_dtype)
        own = {} if "plan" in options else {"bucket_size": "20KiB"}
        self.backend = zerograph.backend(compute="eager", **own, **options)
        if self.net is Net and self.device.type == "cpu":
            self.compiled: Any = TracedOnce(self.model, self.backend)
        else:
            torch._dynamo.reset()
            self.compiled = torch.compile(self.model, backend=self.backend)
        self.optimizer = make(self.model)
        self.losses: list[float] = []
        self.batches = torch.Generator().manual_seed(_rank())

    def begin_again(self, make: Callable[[nn.Module], Optimizer], start: dict[str, Tensor]) -> None:
        """Train another optimizer, from these values."""
        self.model.load_state_dict(start)
        self.optimizer = make(self.model)
        self.optimizer.zero_grad()
        self.losses = []
        self.batches = torch.Generator().manual_seed(_rank())

    def tokens(self) -> Tensor:
        return torch.randint(0, 37, (3, 8), generator=self.batches).to(self.device)

    def backward(self, times: float = 1.0) -> None:
        loss = self.compiled(self.tokens())
        (loss * times).backward()
        self.losses.append(loss.item())

    def steps(self, count: int, **options: Any) -> None:
        for _ in range(count):
            self.backward()
            self.optimizer.step(**options)
            self.optimizer.zero_grad()

    def result(self) -> Trained:
        values = {name: full(value) for name, value in self.model.state_dict().items()}
        states = self.optimizer.state_dict()["state"]
        full_states = {key: {k: full(torch.as_tensor(v)) for k, v in state.items()} for key, state in states.items()}
        return self.losses, values, full_states


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _same(a: Trained, b: Trained) -> None:
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys()
    assert all(torch.equal(value, b[1][name]) for name, value in a[1].items())
    assert a[2].keys() == b[2].keys()
    for key, mine in a[2].items():
        assert mine.keys() == b[2][key].keys()
        assert all(torch.equal(value, b[2][key][name]) for name, value in mine.items())


def _on_nvme(training: Run) -> int:
    """States of parameters that are mappings of extents."""
    places = training.backend._store.locations.places()
    return sum(
        training.backend._store.states.holds(training.optimizer, places[id(p)], name, local_tensor(value))
        for p, state in training.optimizer.state.items()
        if id(p) in places
        for name, value in state.items()
        if name != "step"
    )


def _at_both_tiers(
    folder: str,
    make: Callable[[nn.Module], Optimizer],
    trains: Callable[[Run], None],
    offload: str = "optimizer",
    **options: Any,
) -> Run:
    """Train with states in memory and with states on NVMe: both give the same bits. Returns the latter."""
    results = []
    for more in ({}, {**OFF, "offload": offload, "path": folder}):
        training = Run(make, **options, **more)
        trains(training)
        results.append(training.result())
    _same(*results)
    return training


def _accumulates_and_evaluates(training: Run) -> None:
    training.steps(4)
    training.model.eval()
    with torch.no_grad():
        training.compiled(torch.zeros(2, 8, dtype=torch.long, device=training.device))
    training.model.train()
    for _ in range(2):  # accumulation
        training.backward()
    training.steps(3)


def _equal(
    make: Callable[[nn.Module], Optimizer], folder: str, slot: int, options: dict[str, Any], offload: str = "optimizer"
) -> tuple[int, int]:
    slots.SLOT = slot
    training = _at_both_tiers(folder, make, _accumulates_and_evaluates, offload, **options)
    return _on_nvme(training), sum(training.backend._store.bytes().values())


PLACEMENTS: list[tuple[dict[str, Any], str, list[Callable[[nn.Module], Optimizer]]]] = [
    ({"stage": 1, "dtype": torch.bfloat16}, "optimizer", [adamw, stock]),
    ({"stage": 2}, "optimizer", [lion, stock_adagrad]),
    ({"stage": 2}, "gradients", [groups, momentum, stock]),
    ({"stage": 3}, "parameters", [adamw, momentum, bf16_moments, stock, stock_sgd]),
    ({"stage": 3, "dtype": torch.bfloat16}, "optimizer", [adagrad, stock_sgd, stock]),
    ({"stage": 3, "dtype": torch.bfloat16}, "gradients", [groups, lion]),
    ({"stage": 3, "dtype": torch.bfloat16}, "parameters", [groups, stock, adagrad]),
    ({"stage": 3, "model_dtype": torch.bfloat16}, "optimizer", [mastered]),
    ({"stage": 3, "model_dtype": torch.bfloat16}, "parameters", [mastered, adamw]),
]


def _each_equal(
    makes: list[Callable[[nn.Module], Optimizer]], folder: str, options: dict[str, Any], offload: str
) -> dict[str, tuple[int, int]]:
    """One model in memory, and three whose parts are on NVMe, on the host, and on NVMe behind a host, train with each
    optimizer, from the same start."""
    slots.SLOT = 32 * 2**10
    options_of = {"offload": offload, "path": folder}
    placements = ({}, {**OFF, **options_of}, {**HOST, "offload": offload}, {**BEHIND, **options_of})
    here, nvme, host, behind = runs = [Run(makes[0], **options, **more) for more in placements]
    start = {name: full(value) for name, value in here.model.state_dict().items()}
    found = {}
    for make in makes:
        for training in runs:
            training.begin_again(make, start)
            _accumulates_and_evaluates(training)
        for training in (nvme, host, behind):
            _same(here.result(), training.result())
        found[make.__name__] = _on_nvme(nvme), sum(nvme.backend._store.bytes().values())
        assert _on_nvme(behind) == found[make.__name__][0]
    assert "embedding.weight" in host.backend._store.locations.on_host
    return found


@pytest.mark.parametrize(("options", "offload", "makes"), PLACEMENTS)
def test_training_is_the_same_to_the_bit(
    options: dict[str, Any], offload: str, makes: list[Callable[[nn.Module], Optimizer]], tmp_path: Path
) -> None:
    for found in run(2, _each_equal, makes, str(tmp_path), options, offload):
        # SGD without momentum has no states.
        assert all(size > 0 and bool(states) is (name != "stock_sgd") for name, (states, size) in found.items())
    assert not list(tmp_path.iterdir())  # the file has no name, and is gone with the process


@pytest.mark.parametrize(
    ("world_size", "dtype", "offload"),
    [
        (1, None, "parameters"),
        (1, torch.bfloat16, "optimizer"),
        (4, None, "optimizer"),
        (4, torch.bfloat16, "parameters"),
    ],
)
def test_other_world_sizes(world_size: int, dtype: torch.dtype | None, offload: str, tmp_path: Path) -> None:
    found = run(world_size, _equal, adamw, str(tmp_path), 64 * 2**20, {"stage": 3, "dtype": dtype}, offload)
    assert all(states > 0 and size > 0 for states, size in found)


def test_several_folders_hold_stripes(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    _equal(adamw, [str(f) for f in folders], 32 * 2**10, {"stage": 3})  # type: ignore[arg-type]


def _clipping_and_skipping(training: Run) -> None:
    training.steps(2, clip=0.1)
    training.backward(float("inf"))
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.steps(2, grad_scale=2.0)
    assert training.optimizer.skipped == 1


def _changed_outside(training: Run) -> None:
    """Values that something else wrote are what is gathered next."""
    training.steps(2)
    with torch.no_grad():
        for p in training.model.parameters():
            p.mul_(0.9)
    training.steps(1)
    with torch.no_grad(), zerograph.gathered(training.model, writeback=True):
        training.model.norm.weight.add_(0.25)  # type: ignore[operator]
    training.steps(1)
    torch.optim.SGD(training.model.parameters(), lr=0.0).zero_grad()
    training.backward()
    torch.optim.SGD(training.model.parameters(), lr=0.01).step()
    training.optimizer.zero_grad()
    training.steps(1)


def _becomes_bfloat16(training: Run) -> None:
    training.steps(2)
    training.model.to(torch.bfloat16)
    training.steps(2)


def _without_a_gradient(training: Run) -> None:
    """What an update leaves alone, and somebody changes beside it, is gathered as it was changed."""
    training.steps(2)
    training.backward()
    weight = training.model.layers[0][0].weight
    with torch.no_grad():
        weight.mul_(0.5)
    weight.grad = None
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.steps(2)
    with torch.no_grad():
        torch._foreach_mul_(list(training.model.parameters()), 0.5)  # no version of a DTensor shows it
    training.backend.refresh()
    training.steps(1)


def _mixed(folder: str, trains: Callable[[Run], None]) -> None:
    _at_both_tiers(folder, adamw, trains, stage=3, dtype=torch.bfloat16)


@pytest.mark.parametrize("trains", [_clipping_and_skipping, _changed_outside, _becomes_bfloat16, _without_a_gradient])
def test_unusual_steps_are_the_same_to_the_bit(trains: Callable[[Run], None], tmp_path: Path) -> None:
    run(2, _mixed, str(tmp_path), trains)


def _saved(optimizer: Optimizer) -> dict[str, Any]:
    """Its state dict, of tensors that no step changes any more."""
    saved = optimizer.state_dict()
    states = {key: {k: torch.as_tensor(v).clone() for k, v in state.items()} for key, state in saved["state"].items()}
    return {**saved, "state": states}


def _resumed(make: Callable[[nn.Module], Optimizer], folder: str, kind: str) -> None:
    checkpoint = os.path.join(folder, "checkpoint")
    first = Run(make, stage=3, dtype=torch.bfloat16, **OFF, path=folder)
    first.steps(3)
    if kind == "dcp":
        model, optimizer = get_state_dict(first.model, first.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=checkpoint)
    else:
        state = {k: v.clone() for k, v in first.model.state_dict().items()}, _saved(first.optimizer)
    first.batches = torch.Generator().manual_seed(99 + _rank())

    def resumes(second: Run) -> None:
        second.steps(1)
        if kind == "dcp":
            model, optimizer = get_state_dict(second.model, second.optimizer)
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=checkpoint)
            set_state_dict(second.model, second.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        else:
            second.model.load_state_dict(state[0])
            second.optimizer.load_state_dict(copy.deepcopy(state[1]))  # torch keeps the tensors it is given
        second.losses, second.batches = [], torch.Generator().manual_seed(99 + _rank())
        second.steps(3)

    assert _on_nvme(_at_both_tiers(folder, make, resumes, stage=3, dtype=torch.bfloat16))


@pytest.mark.parametrize(("make", "kind"), [(adamw, "dcp"), (stock, "state_dict")])
def test_checkpoints_load_at_either_tier(make: Callable[[nn.Module], Optimizer], kind: str, tmp_path: Path) -> None:
    run(2, _resumed, make, str(tmp_path), kind)


def _goes_on(folder: str) -> None:
    """Optimizers outlive their backend, and go on with another one, of whatever offload."""
    remote = {**OFF, "path": folder}
    for later in ({}, remote):

        def trains(training: Run, later: dict[str, Any] = later) -> None:
            offloaded = training.backend.config.offload != "none"
            training.steps(2)
            del training.backend, training.compiled
            torch._dynamo.reset()
            gc.collect()
            options = later if offloaded else {}
            training.backend = zerograph.backend(stage=3, dtype=torch.bfloat16, compute="eager", **options)
            training.compiled = torch.compile(training.model, backend=training.backend)
            training.steps(3)

        _mixed(folder, trains)


@pytest.mark.slow
def test_another_backend_goes_on(tmp_path: Path) -> None:
    run(2, _goes_on, str(tmp_path))


def _states_before_placement(folder: str, make: Callable[[nn.Module], Optimizer], kind: str) -> int:
    def trains(training: Run) -> None:
        if kind == "initialized":
            zerograph.shard(training.model, training.backend)
            get_state_dict(training.model, training.optimizer)

        def closure() -> float:
            training.optimizer.zero_grad()
            training.backward()
            return training.losses[-1]

        for _ in range(3):
            training.optimizer.step(closure)
            training.optimizer.zero_grad()

    return _on_nvme(_at_both_tiers(folder, make, trains, stage=3))


@pytest.mark.parametrize(("make", "kind"), [(adamw, "closure"), (stock, "initialized")])
def test_states_that_are_made_before_the_first_plan_are_offloaded(
    make: Callable[[nn.Module], Optimizer], kind: str, tmp_path: Path
) -> None:
    assert all(run(2, _states_before_placement, str(tmp_path), make, kind))


def _two_backends(folder: str) -> None:
    first, second = (Run(adamw, stage=3, **OFF, path=folder) for _ in range(2))
    for training in (first, second):
        training.steps(1)
    both = adamw(nn.ModuleList([first.model, second.model]))
    for training in (first, second):
        training.backward()
    with pytest.raises(UnsupportedError, match="parameters of two backends"):
        both.step()


def test_one_optimizer_over_two_offloading_backends_is_refused(tmp_path: Path) -> None:
    run(2, _two_backends, str(tmp_path))


def _other_dtypes(folder: str, model_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    for make in (adamw, mastered):
        _at_both_tiers(folder, make, lambda training: training.steps(3), model_dtype=model_dtype, stage=3, dtype=dtype)


@pytest.mark.parametrize(
    ("model_dtype", "dtype"),
    [(torch.bfloat16, torch.float32), (None, torch.float64), (None, torch.float16)],
)
def test_parameters_that_compute_in_any_dtype(
    model_dtype: torch.dtype | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    run(2, _other_dtypes, str(tmp_path), model_dtype, dtype)


def _two_optimizers(folder: str) -> None:
    training = Run(adamw, stage=3, **OFF, path=folder)
    training.steps(2)
    training.optimizer = adamw(training.model)  # a new one begins with zeros, in place of the old one
    plain = Run(adamw, stage=3)
    plain.model.load_state_dict(training.result()[1])
    plain.losses, training.losses = [], []
    for each in (training, plain):
        each.batches = torch.Generator().manual_seed(5 + _rank())
        each.steps(2)
    _same(training.result(), plain.result())
    training.optimizer.state.clear()
    plain.optimizer.state.clear()
    for each in (training, plain):
        each.steps(1)
    _same(training.result(), plain.result())


def test_new_optimizers_begin_with_new_states(tmp_path: Path) -> None:
    run(2, _two_optimizers, str(tmp_path))


def _needs_three_moments(folder: str, nvme: str | None) -> None:
    model = nn.Linear(300, 300)
    compiled = torch.compile(model, backend=zerograph.backend(compute="eager", **OFF, path=folder, nvme=nvme))
    optimizer = zerograph.optim.AdamW(model.parameters(), amsgrad=True)
    compiled(torch.randn(2, 300)).sum().backward()
    optimizer.step()


def test_no_room_for_more_moments_is_said_with_what_mends_it(tmp_path: Path) -> None:
    run(1, _needs_three_moments, str(tmp_path), "2MiB")
    (small,) = run(1, refused, _needs_three_moments, str(tmp_path), "64KiB")
    assert re.search(r"the plan keeps 705 KiB on NVMe per rank .* and may use 60.2 KiB", small), small
    (later,) = run(1, refused, _needs_three_moments, str(tmp_path), None)
    assert re.search(r"no room for (?s:.*)max_exp_avg_sq of bucket", later), later
    run(1, _needs_three_moments, str(tmp_path), _said(later))


def _said(message: str) -> str:
    """Room that an error says is enough."""
    (said,) = re.findall(r"nvme='(\w+)'", message)
    return said


def _unfrozen(folder: str, nvme: str | None) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    options = {"offload": "parameters", "path": folder, "nvme": nvme}
    compiled = torch.compile(model, backend=zerograph.backend(compute="eager", **options))
    optimizer = zerograph.optim.AdamW(model.parameters())
    for frozen in (True, False):
        model[0].requires_grad_(not frozen)
        compiled(torch.randn(2, 300)).sum().backward()
        optimizer.step()


def test_room_for_what_is_unfrozen_is_said(tmp_path: Path) -> None:
    (later,) = run(1, refused, _unfrozen, str(tmp_path), None)
    assert "parameters that train only later" in later
    run(1, _unfrozen, str(tmp_path), _said(later))


def _refused(folder: str) -> None:
    training = Run(lambda m: torch.optim.RMSprop(m.parameters()), stage=3, **OFF, path=folder)
    training.backward()
    with pytest.raises(UnsupportedError, match="RMSprop cannot keep its states on NVMe"):
        training.optimizer.step()


def test_stock_optimizers_whose_states_nobody_knows_are_refused(tmp_path: Path) -> None:
    run(1, _refused, str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "optimizer"}, "need a folder"),
        ({"offload": "auto", "memory": "1GiB"}, "need a folder"),
        ({"offload": "auto", "path": "/tmp", "stage": 0}, "stage 0 cannot offload optimizer"),
        ({"offload": "optimizer", "tier": "nvme"}, "need a folder"),
        ({"path": "/tmp"}, "path given, and nothing goes to NVMe"),
        ({"offload": "optimizer", "tier": "nvme", "path": 3}, "a folder or a list of them, got 3"),
        ({"offload": "optimizer", "tier": "nvme", "path": "/tmp", "stage": 0}, "stage 0 cannot offload optimizer"),
        ({"offload": "optimizer", "tier": "nvme", "path": "/tmp", "nvme": "much"}, "nvme: "),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        zerograph.backend(**options)


@pytest.fixture(autouse=True)
def _slot() -> Iterator[None]:
    before = slots.SLOT
    yield
    slots.SLOT = before
