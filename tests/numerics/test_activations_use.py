"""Loops that do something else than one forward and one backward, with activations on NVMe and on the host: the same
bits as on the device, and room that is free again."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics.test_activations import SPLIT
from numerics.test_offload_faults import ENGINES
from numerics.test_recompute import LENGTH, ROWS, Model
from ranks import run
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from traced import TracedOnce

import zerograph
from zerograph._core import FaultEffect, FaultPoint
from zerograph.core.errors import StorageError, ZeroGraphError

HOST: dict[str, Any] = {"activations": "host", "machine": SPLIT}


def nvme(folder: str, **more: Any) -> dict[str, Any]:
    return {"activations": "nvme", "path": folder, **more}


class Training:
    """A model, its backend, and batches; ``once`` it is traced in a process, and Dynamo has no part in it."""

    def __init__(self, make: Callable[[], nn.Module] = Model, once: bool = False, **options: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = make()
        self.backend = zerograph.backend(**{"compute": "eager", "bucket_size": "8KB", "stage": 3, **options})
        compiler: Any = TracedOnce if once else torch.compile
        self.compiled = compiler(self.model, backend=self.backend)
        self.generator = torch.Generator().manual_seed(1)

    def loss(self, rows: int = ROWS, length: int = LENGTH) -> Tensor:
        return self.compiled(torch.randn(rows, length, 5, generator=self.generator)).square().sum()

    def grads(self) -> list[Tensor]:
        """The gradients so far, which are then gone."""
        found = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad()
        return found


def _retained(training: Training) -> None:
    loss = training.loss()
    for times in range(3):
        loss.backward(retain_graph=times < 2)


def _asked_for(training: Training) -> None:
    loss = training.loss()
    again = torch.autograd.grad(loss, [*training.model.parameters()], retain_graph=True)
    loss.backward()
    for parameter, grad in zip(training.model.parameters(), again, strict=True):
        assert torch.equal(parameter.grad, grad)  # type: ignore[arg-type]


def _dropped(training: Training) -> None:
    for _ in range(3):
        training.loss()
    training.loss().backward()


def _interrupted(training: Training) -> None:
    with contextlib.suppress(KeyError):
        training.loss()
        raise KeyError
    training.loss().backward()


def _two_forwards(training: Training) -> None:
    first, second = training.loss(), training.loss()
    (2 * second + first).backward()


def _evaluated_between(training: Training) -> None:
    loss = training.loss()
    with torch.no_grad():
        training.loss()
    with torch.inference_mode():
        training.loss()
    loss.backward()


def _hooks(training: Training) -> None:
    with save_on_cpu():
        training.loss().backward()
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        loss = training.loss()
    training.loss().backward()  # into the room that is free at once, as copies are kept
    loss.backward()
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor * 1):
        training.loss().backward()


def _other_sizes(training: Training) -> None:
    """Each is compiled anew: several ranks, whose rooms are as that of one, have the larger one and the empty one."""
    sizes = ((ROWS, LENGTH), (3 * ROWS, LENGTH), (0, LENGTH), (1, 1), (ROWS, 3))
    for rows, length in sizes if torch.distributed.get_world_size() == 1 else sizes[:3]:
        training.loss(rows, length).backward()


USES = (_retained, _asked_for, _dropped, _interrupted, _two_forwards, _evaluated_between, _hooks, _other_sizes)


def _all_uses(once: bool, options: dict[str, Any]) -> list[list[Tensor]]:
    training = Training(once=once, **options)
    found = []
    for use in USES:
        use(training)
        found.append(training.grads())
    gc.collect()
    slots = (slot for slots in training.backend._store.saved._slots.values() for slot in slots)
    assert all(slot.is_free for slot in slots)
    return found


def _same_uses(folder: str) -> None:
    """Of what one rank sees, Dynamo, and its graphs of any size, are there where most goes on: one place is behind
    another, and layers are computed again."""
    truth = _all_uses(True, {})
    again, behind = nvme(folder, recompute="full"), nvme(folder, machine=SPLIT)
    for options in (nvme(folder), nvme(folder, nvme="4MiB"), HOST, again, behind):
        once = torch.distributed.get_world_size() > 1 or options not in (again, behind)
        for use, ours, theirs in zip(USES, _all_uses(once, options), truth, strict=True):
            assert len(ours) == len(theirs) > 0
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), (options, use.__name__)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_unusual_loops_are_the_same_to_the_bit(world_size: int, tmp_path: Path) -> None:
    run(world_size, _same_uses, str(tmp_path), timeout=300)


def _warns(folder: str) -> tuple[list[str], int]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerograph").addHandler(handler)
    training = Training(**nvme(folder))
    for _ in range(3):
        _two_forwards(training)
    logging.getLogger("zerograph").removeHandler(handler)
    return [text for text in records if "activations stay in memory" in text], training.backend._store.bytes()[
        "activations"
    ]


def test_more_forwards_than_were_planned_for_are_reported_once(tmp_path: Path) -> None:
    warnings, size = run(1, _warns, str(tmp_path))[0]
    assert len(warnings) == 1 and size > 0


# ---- disks that fail


def _error_of(training: Training) -> ZeroGraphError | None:
    """Why a step fails, if it does; without what its traceback keeps."""
    try:
        training.loss().backward()
    except ZeroGraphError as error:
        return error.with_traceback(None)
    return None


def _every_transfer(folder: str, engine: str, more: dict[str, Any]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROGRAPH_IO", engine)
        training = Training(**nvme(folder, **more))
        training.loss().backward()
        training.grads()
    arena, state, failed = training.backend._store.room.arena, training.generator.get_state(), 0
    training.loss().backward()
    truth = training.grads()
    for point in (FaultPoint.write, FaultPoint.read):
        for nth in range(1, 1000):
            training.generator.set_state(state)
            arena._engine.inject([(point, nth, 1, FaultEffect.error, 28 if point is FaultPoint.write else 5)])
            error = _error_of(training)
            if error is None:
                break  # there is no such transfer
            assert isinstance(error, StorageError) and f"cannot {point.name} " in str(error)
            failed += 1
            training.model.zero_grad()
            training.generator.set_state(state)
            training.loss().backward()
            assert all(torch.equal(a, b) for a, b in zip(training.grads(), truth, strict=True))
        training.model.zero_grad()
    return failed


@pytest.mark.parametrize(
    ("engine", "more"), [(ENGINES[0], {"machine": SPLIT}), (ENGINES[-1], {})], ids=["threads, behind the host", "nvme"]
)
def test_any_transfer_may_fail_and_the_step_is_repeated(engine: str, more: dict[str, Any], tmp_path: Path) -> None:
    assert run(1, _every_transfer, str(tmp_path), engine, more)[0] > 20


def _fails_on_one_rank(folder: str) -> str:
    training = Training(**nvme(folder))
    training.loss().backward()
    truth, state = training.grads(), training.generator.get_state()
    if torch.distributed.get_rank() == 0:
        training.backend._store.room.arena._engine.inject([(FaultPoint.write, 2, 1, FaultEffect.error, 28)])
    error = _error_of(training)
    training.model.zero_grad()
    training.generator.set_state(state)
    training.loss().backward()
    assert len(training.grads()) == len(truth)
    return f"{type(error).__name__}: {error}"


def test_a_write_that_fails_on_one_rank_is_an_error_on_all_who_then_go_on(tmp_path: Path) -> None:
    first, second = run(2, _fails_on_one_rank, str(tmp_path), timeout=60)
    assert first.startswith("StorageError: cannot write ")
    assert second.startswith("RankError: ") and "rank 0 failed" in second and "StorageError: cannot write" in second
