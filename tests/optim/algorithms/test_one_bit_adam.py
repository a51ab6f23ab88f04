"""OneBitAdam on ranks is the paper's algorithm, written plainly in one process over the gradients of all ranks."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import refused, run, warned
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F
from traced import compile_once

import zerograph
from zerograph.core.errors import ConfigError, RankError, StorageError, UnsupportedError, ZeroGraphError
from zerograph.core.step import WIRE_BLOCK
from zerograph.optim import AdamW, OneBitAdam
from zerograph.optim.algorithms import one_bit_adam as module
from zerograph.runtime.torch_private import local_tensor

WORLD, FREEZE, STEPS = 2, 6, 20
LR, DECAY, BETAS, EPS = 0.01, 0.1, (0.9, 0.99), 1e-8


class Net(nn.Module):
    """Matrices of more than a block, vectors, a scalar, rows that no gradient reaches, and five rows for four ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(13, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.few = nn.Parameter(torch.randn(5, 24))
        self.head = nn.Linear(24, 13, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.few.mean(0)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x * self.scale), tokens.roll(1, 0))


def batch(step: int, rank: int) -> Tensor:
    """Token 12 never comes."""
    return torch.randint(12, (9,), generator=torch.Generator().manual_seed(100 * step + rank))


# The algorithm.


class Plain:
    """Algorithm 1 of the paper for all ranks at once, with Adam's bias corrections and decoupled weight decay."""

    def __init__(self, model: nn.Module, world: int = WORLD) -> None:
        self.params, self.world, self.count = list(model.parameters()), world, 0
        self.m = [torch.zeros_like(p) for p in self.params]
        self.v = [torch.zeros_like(p) for p in self.params]
        self.sent = [[torch.zeros_like(p) for p in self.params] for _ in range(world)]
        self.averaged = [torch.zeros_like(p).view(-1) for p in self.params]

    @torch.no_grad()
    def step(self, grads: list[list[Tensor]]) -> None:
        """``grads`` are those of each rank."""
        self.count += 1
        for i, p in enumerate(self.params):
            own = [each[i] for each in grads]
            if self.count <= FREEZE:
                mean = torch.stack(own).mean(0)
                self.m[i] = self.m[i] + (1 - BETAS[0]) * (mean - self.m[i])
                self.v[i] = BETAS[1] * self.v[i] + (1 - BETAS[1]) * mean**2
            else:
                self.m[i] = self._averaged(i, [BETAS[0] * self.m[i] + (1 - BETAS[0]) * g for g in own])
            v = self.v[i] / (1 - BETAS[1] ** min(self.count, FREEZE))
            update = self.m[i] / (1 - BETAS[0] ** self.count) / (v.sqrt() + EPS)
            p *= 1 - LR * DECAY
            p -= LR * torch.where(v > 0, update, 0.0)

    def _averaged(self, i: int, momenta: list[Tensor]) -> Tensor:
        signs, chunk = [], -(-momenta[0].numel() // self.world)
        for rank, momentum in enumerate(momenta):
            value = momentum + self.sent[rank][i]
            signs.append(as_signs(value.view(-1), chunk))
            self.sent[rank][i] = value - signs[-1].view_as(value)
        value = torch.stack(signs).mean(0) + self.averaged[i]
        found = as_signs(value, chunk)
        self.averaged[i] = value - found
        return found.view_as(momenta[0])


def as_signs(flat: Tensor, chunk: int) -> Tensor:
    """Signs and mean magnitudes of blocks of the part of each rank; zeros pad the last one's."""
    found = []
    for part in flat.split(chunk):
        full = F.pad(part, (0, chunk - len(part)))
        signs = [torch.where(b >= 0, 1.0, -1.0) * b.abs().mean() for b in full.split(WIRE_BLOCK)]
        found.append(torch.cat(signs)[: len(part)])
    return torch.cat(found)


def plainly(steps: int = STEPS, micro: int = 1, world: int = WORLD) -> list[Tensor]:
    model = Net()
    plain = Plain(model, world)
    for step in range(steps):
        grads = []
        for rank in range(world):
            model.zero_grad()
            for i in range(micro):
                model(batch(micro * step + i, rank)).backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        plain.step(grads)
    return [p.detach() for p in model.parameters()]


# Ranks.


def of(model: nn.Module, **options: Any) -> OneBitAdam:
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    given: dict[str, Any] = {"lr": LR, "freeze_step": FREEZE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    return OneBitAdam([{"params": matrices}, {"params": others}], **given | options)


def made(stage: int, once: bool = True, **options: Any) -> tuple[nn.Module, zerograph.Backend, OneBitAdam]:
    """Traced ``once`` for all models, or as any model is compiled."""
    model = Net()
    backend = zerograph.backend(stage=stage, compute="eager", **options)
    if once:
        compile_once(model, backend, "mesh" in options)
    else:
        torch._dynamo.reset()
        model.compile(backend=backend)
    return model, backend, of(model)


def trained(model: nn.Module, optimizer: Any, steps: range, rank: int, micro: int = 1) -> None:
    for step in steps:
        for i in range(micro):
            model(batch(micro * step + i, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    with zerograph.gathered(model):
        return [p.detach().clone() for p in model.parameters()]


def _rank() -> int:
    return torch.distributed.get_rank()


def _trained(stage: int, micro: int) -> list[Tensor]:
    model, _, optimizer = made(stage)
    trained(model, optimizer, range(STEPS), _rank(), micro)
    assert optimizer.is_frozen
    return values(model)


@pytest.mark.parametrize(("stage", "micro"), [(0, 2), (1, 1)])
def test_it_is_the_papers_algorithm(stage: int, micro: int) -> None:
    expected = plainly(micro=micro)
    for found in run(WORLD, _trained, stage, micro):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_rank_without_rows_and_ranks_with_fewer() -> None:
    expected = plainly(world=4)
    for found in run(4, _trained, 1, 1):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def _kept() -> int:
    """A gradient that was not dropped is in the next step's, as without ranks; a dropped one is not."""
    model, backend, optimizer = made(0, once=False)
    rank = _rank()
    trained(model, optimizer, range(FREEZE), rank)
    model(batch(0, rank)).backward()
    optimizer.zero_grad(set_to_none=False)
    assert not backend._accumulation.names
    model(batch(1, rank)).backward()
    optimizer.step()
    first = backend._accumulation.of_this_rank()[id(model.scale)].clone()
    model(batch(1, rank)).backward()
    torch.testing.assert_close(backend._accumulation.of_this_rank()[id(model.scale)], first + _own(model, 1, rank))
    model.zero_grad()
    model(batch(2, rank)).backward()
    torch.testing.assert_close(backend._accumulation.of_this_rank()[id(model.scale)], _own(model, 2, rank))
    with backend.no_sync():  # changes nothing
        model(batch(2, rank)).backward()
    optimizer.step()
    with pytest.raises(ZeroGraphError, match=r"while OneBitAdam, which still lives[\s\S]*hint: let go of it"):
        AdamW(model.parameters()).step()
    del optimizer
    model.zero_grad()
    model(batch(3, rank)).backward()
    assert not backend._accumulation.names
    return len(backend.frames)


def _own(model: nn.Module, step: int, rank: int) -> Tensor:
    """The gradient of the scale that this rank has."""
    plain = Net()
    plain.load_state_dict(dict(zip(plain.state_dict(), values(model), strict=True)))
    plain(batch(step, rank)).backward()
    assert plain.scale.grad is not None
    return plain.scale.grad


def test_gradients_stay_until_they_are_dropped_and_nothing_is_compiled_again() -> None:
    assert run(WORLD, _kept) == [1] * WORLD


def _bad(stage: int, value: float) -> list[Tensor]:
    model, _, optimizer = made(stage)
    rank = _rank()
    for step in range(STEPS + 2):
        loss = model(batch(step - 2 * (step > 9), rank))
        (loss * (value if rank and step in (8, 9) else 1.0)).backward()
        before = copy.deepcopy(optimizer.state_dict()["state"]), values(model)
        optimizer.step()
        optimizer.zero_grad()
        if step in (8, 9):
            torch.testing.assert_close((optimizer.state_dict()["state"], values(model)), before, rtol=0, atol=0)
    assert optimizer.skipped == 2
    return values(model)


@pytest.mark.parametrize(("stage", "value"), [(0, float("nan")), (1, float("inf"))])
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any(stage: int, value: float) -> None:
    expected = plainly()  # the two skipped steps are behind freeze_step
    for found in run(WORLD, _bad, stage, value):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def _resumed(stage: int, at: int) -> list[str]:
    rank = _rank()
    whole, _, optimizer = made(stage)
    trained(whole, optimizer, range(at), rank)
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    trained(whole, optimizer, range(at, STEPS), rank)
    model, backend, _ = made(stage)
    zerograph.shard(model, backend)
    model.load_state_dict(saved[0])
    other = of(model, freeze_step=1)
    with warned() as messages:
        other.load_state_dict(saved[1])
        trained(model, other, range(at, STEPS), rank)
    for ours, theirs in zip(values(model), values(whole), strict=True):
        assert torch.equal(ours, theirs)
    return messages


@pytest.mark.parametrize(("stage", "at"), [(0, 3), (1, FREEZE), (0, 11), (1, 11)])
def test_a_run_that_was_resumed_is_the_same_to_the_bit(stage: int, at: int) -> None:
    assert run(WORLD, _resumed, stage, at) == [[], []]


def _with_errors_of_others(stage: int) -> list[str]:
    rank = _rank()
    model, _, optimizer = made(stage)
    trained(model, optimizer, range(10), rank)
    saved = copy.deepcopy(optimizer.state_dict())
    for number, state in saved["state"].items():
        saved["state"][number] = {name.replace(f"of {WORLD}", f"of {WORLD + 1}"): v for name, v in state.items()}
    with warned() as messages:
        optimizer.load_state_dict(saved)
        trained(model, optimizer, range(10, 12), rank)
    assert not any(f"of {WORLD + 1}" in name for state in optimizer.state.values() for name in state)
    own = sum(local_tensor(state[f"error of rank {rank} of {WORLD}"]).numel() for state in optimizer.state.values())
    assert own == sum(p.numel() for p in Net().parameters())
    return messages


@pytest.mark.parametrize("stage", [0, 1])
def test_errors_of_other_ranks_are_left_out_with_a_word(stage: int) -> None:
    for rank, messages in enumerate(run(WORLD, _with_errors_of_others, stage)):
        (message,) = messages
        assert f"has no error of rank {rank} of 2" in message


def test_one_process_compresses_too() -> None:
    model = Net()
    optimizer = of(model)
    trained(model, optimizer, range(STEPS), 0)
    expected = Net()
    plain = Plain(expected, 1)
    for step in range(STEPS):
        expected.zero_grad()
        expected(batch(step, 0)).backward()
        plain.step([[p.grad for p in expected.parameters()]])
    torch.testing.assert_close(list(model.parameters()), list(expected.parameters()), rtol=0, atol=1e-6)


def test_it_can_be_let_go_of_after_a_step_that_was_waited_for() -> None:
    """Else a backward would go on holding gradients for it."""
    model = Net()
    optimizer = of(model)
    trained(model, optimizer, range(FREEZE), 0)
    model(batch(FREEZE, 0)).backward()
    optimizer.start_step().wait()
    lives = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert lives() is None


def test_a_state_dict_of_adamw_has_taken_no_step() -> None:
    model = Net()
    other = AdamW([{"params": g["params"]} for g in of(model).param_groups], lr=LR)
    trained(model, other, range(3), 0)
    optimizer = of(model)
    optimizer.load_state_dict(other.state_dict())
    trained(model, optimizer, range(FREEZE - 1), 0)
    assert not optimizer.is_frozen
    trained(copy.deepcopy(model), copy.deepcopy(optimizer), range(FREEZE), 0)


def test_a_parameter_without_a_gradient_in_the_first_frozen_step_is_frozen_too() -> None:
    first, second = Net().layers
    optimizer = OneBitAdam([*first.parameters(), *second.parameters()], freeze_step=2)
    for used in ((first, second), (first, second), (first,), (second,), (first, second)):
        optimizer.zero_grad()
        sum(layer(torch.ones(3, 24)).square().mean() for layer in used).backward()
        before = optimizer.state[second.bias].get("exp_avg_sq", torch.zeros(())).clone()
        with warned() as messages:
            optimizer.step()
        if used == (first,):
            torch.testing.assert_close(optimizer.state[second.bias]["exp_avg_sq"], before / (1 - 0.999**2))
        elif optimizer.param_groups[0]["taken"] > 3:
            assert torch.equal(optimizer.state[second.bias]["exp_avg_sq"], before)
        assert messages == []


# Refusals.


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": "small"}, {"freeze_step": 0}, {"freeze_step": 2.5},
        {"overlap": True}, {"delayed": True},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"OneBitAdam.*{next(iter(options))}="):
        of(Net(), **options)


def test_groups_freeze_together() -> None:
    first, second = Net().layers
    groups = [{"params": first.parameters()}, {"params": second.parameters(), "freeze_step": 3}]
    with pytest.raises(ConfigError, match="the same for all groups"):
        OneBitAdam(groups, freeze_step=2)
    optimizer = OneBitAdam(first.parameters(), freeze_step=1)
    first(torch.randn(3, 24)).sum().backward()
    optimizer.step()
    with pytest.raises(UnsupportedError, match="after its freeze_step=1"):
        optimizer.add_param_group({"params": list(second.parameters())})


def test_other_dtypes_and_late_gradients() -> None:
    optimizer = OneBitAdam(nn.Linear(2, 2, dtype=torch.bfloat16).parameters(), freeze_step=2)
    with pytest.raises(UnsupportedError, match=r"bfloat16.*\n*.*hint: .*dtype=torch.bfloat16"):
        optimizer.step()
    first, second = Net().layers
    optimizer = OneBitAdam([*first.parameters(), *second.parameters()], freeze_step=1)
    for layer in (first, second):
        layer(torch.randn(3, 24)).sum().backward()
        if layer is first:
            optimizer.step()
    with pytest.raises(UnsupportedError, match="parameter 2 of group 0 has its first gradient after freeze_step=1"):
        optimizer.step()


def _message(call: Any, *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except (UnsupportedError, RankError) as error:  # a rank may hear of another's first
        return str(error)
    return ""


def _refused_when_frozen(stage: int) -> list[str]:
    model, _, optimizer = made(stage)
    rank = _rank()
    trained(model, optimizer, range(FREEZE), rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    found = []
    for call in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: zerograph.clip_grad_norm_(model.parameters(), 1.0),
        lambda: optimizer.step(clip=1.0),
        lambda: scaler.step(optimizer),
    ):
        scaler.scale(model(batch(FREEZE, rank))).backward()
        found.append(_message(call))
        optimizer.zero_grad()
    found.append(_message(torch.autograd.grad, model(batch(FREEZE, rank)), list(model.parameters())))
    trained(model, optimizer, range(FREEZE, STEPS), rank)
    expected = plainly()
    torch.testing.assert_close(values(model), expected, rtol=0, atol=1e-6)
    return found


@pytest.mark.parametrize("stage", [0, 1])
def test_what_needs_averages_is_refused_once_frozen_and_training_goes_on(stage: int) -> None:
    for found in run(WORLD, _refused_when_frozen, stage):
        words = ["clip them by different norms"] * 2 + [r"step(clip=)", "GradScaler", "while OneBitAdam"]
        assert all(word in message and "hint:" in message for word, message in zip(words, found, strict=True)), found


def _refused_at_once(options: dict[str, Any], left_out: bool) -> str:
    if options.pop("replicas", False):
        options["mesh"] = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1))
    model, _, optimizer = made(**options)
    if left_out:
        optimizer = OneBitAdam(model.layers.parameters(), freeze_step=3)
    model(batch(0, _rank())).backward()
    before = values(model)
    message = _message(optimizer.step)
    torch.testing.assert_close(values(model), before, rtol=0, atol=0)
    assert not optimizer.state
    return message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 2}, "at stage 2"),
        ({"stage": 3}, "at stage 3"),
        ({"stage": 1, "replicas": True}, "on a mesh of two axes"),
        ({"stage": 1, "offload": "optimizer", "tier": "nvme"}, "with offload="),
        ({"stage": 0}, "4 trainable parameters of the backend are in no group"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_anything_changes(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    given = options | ({"path": str(tmp_path)} if "tier" in options else {})
    for message in run(WORLD, _refused_at_once, given, options == {"stage": 0}):
        assert words in message and "hint: " in message


def _fails_half_way(stage: int) -> list[str]:
    model, _, optimizer = made(stage)
    trained(model, optimizer, range(FREEZE + 1), _rank())
    found = []
    with pytest.MonkeyPatch.context() as patch:
        if _rank():
            patch.setattr(module._Averaged, "update", lambda *_: 1 / 0)
        for _ in range(2):
            try:
                model(batch(FREEZE, _rank())).backward()
                optimizer.step()
            except (ZeroDivisionError, RankError, StorageError) as error:
                found.append(type(error).__name__)
            optimizer.zero_grad()
    return found


def test_a_step_that_fails_on_one_rank_ends_on_all_until_a_checkpoint_is_loaded() -> None:
    assert run(WORLD, _fails_half_way, 0) == [["RankError", "StorageError"], ["ZeroDivisionError", "StorageError"]]


def _different_gradients() -> None:
    model, _, optimizer = made(0)
    trained(model, optimizer, range(FREEZE), _rank())
    model(batch(FREEZE, _rank())).backward()
    if _rank():
        model.scale.grad = None
    optimizer.step()


def test_ranks_that_have_gradients_of_other_parameters_hear_of_it() -> None:
    for text in run(WORLD, refused, _different_gradients):
        assert "CollectiveMismatch" in text


def _loaded(model: Any, optimizer: Any, folder: str) -> None:
    found = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])


def _through_dcp(stage: int, folder: str) -> list[str]:
    rank = _rank()
    model, backend, optimizer = made(stage)
    trained(model, optimizer, range(10), rank)
    saved = get_state_dict(model, optimizer)
    dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=folder)
    trained(model, optimizer, range(10, STEPS), rank)
    expected = values(model)
    _loaded(model, optimizer, folder)  # the optimizer that has trained, whose errors are its rank's
    trained(model, optimizer, range(10, STEPS), rank)
    torch.testing.assert_close(values(model), expected, rtol=0, atol=0)
    _loaded(model, optimizer, folder)
    for state in optimizer.state.values():
        for name in (f"error of rank {rank} of {WORLD}", f"averaged error of rank {rank} of {WORLD}"):
            state[name].zero_()
    trained(model, optimizer, range(10, STEPS), rank)
    expected = values(model)
    model, backend, optimizer = made(stage)
    zerograph.shard(model, backend)
    with warned() as messages:
        _loaded(model, optimizer, folder)
        assert optimizer.is_frozen
        trained(model, optimizer, range(10, STEPS), rank)
    torch.testing.assert_close(values(model), expected, rtol=0, atol=0)
    return messages


@pytest.mark.parametrize("stage", [0, 1])
def test_torchs_checkpoints_leave_errors_out_with_a_word(stage: int, tmp_path: Path) -> None:
    for messages in run(WORLD, _through_dcp, stage, str(tmp_path)):
        assert "begins without the errors of signs" in messages[0]


def test_one_process_with_a_backend() -> None:
    model, backend, optimizer = made(0)
    alone = Net()
    trained(model, optimizer, range(STEPS), 0)
    trained(alone, of(alone), range(STEPS), 0)
    torch.testing.assert_close(values(model), [p.detach() for p in alone.parameters()], rtol=0, atol=1e-6)
    assert not backend._accumulation.names
