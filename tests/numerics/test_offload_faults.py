"""Transfers that fail at any place of a step: an error that names the disk, and training that goes on to the same bits.

After an error in a forward, a backward or the norm of gradients the step is repeated. After one in an update nothing
goes on before a checkpoint is loaded, as a part of the parameters may be new.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from numerics.compare import full
from numerics.test_offload import BEHIND, OFF, Run, Trained, _rank, _same, _saved, adamw
from ranks import run, server
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F

import zerograph
import zerograph._core as _core
from zerograph._core import FaultEffect, FaultPoint
from zerograph.core.errors import StorageError, ZeroGraphError
from zerograph.runtime.offload import slots

ENGINES = ["threads"] + ["uring"] * (_core.has_uring() and _core.probe_uring() == 0)


class Small(nn.Module):
    """Several buckets, one of them in several chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 40)
        self.layer = nn.Sequential(nn.Linear(40, 90), nn.GELU(), nn.Linear(90, 40))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layer(self.embedding(tokens)) * self.scale
        return F.cross_entropy((x @ self.embedding.weight.T).flatten(0, 1), tokens.flatten())


class Faulty(Run):
    """A training that takes one step, of two micro-batches, again and again from the same start."""

    net = Small

    def __init__(self, folder: str, offloaded: dict[str, Any]) -> None:
        super().__init__(adamw, stage=3, **{**offloaded, "offload": "parameters"}, path=folder)
        self.begins()

    def begins(self) -> None:
        self.steps(1)
        self.start = {name: full(value).clone() for name, value in self.model.state_dict().items()}
        self.states, self.batch = _saved(self.optimizer), self.batches.get_state()
        self.place, self.starts = "", False
        self.armed: tuple[str, FaultPoint] | None = None  # the next transfer that fails, from a place on

    def load(self) -> None:
        self.model.load_state_dict(self.start)
        self.optimizer.load_state_dict(copy.deepcopy(self.states))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.batches.set_state(self.batch)
        self.losses = []
        for micro in range(2):
            self._comes_to(f"forward {micro}")
            loss = self.compiled(self.tokens())
            self._comes_to(f"backward {micro}")
            loss.backward()
            self.losses.append(loss.item())
        self._comes_to("update")
        self.optimizer.start_step().wait() if self.starts else self.optimizer.step()
        self._comes_to("")

    def _comes_to(self, place: str) -> None:
        self.place = place
        if self.armed is not None and self.armed[0] == place:
            self.inject(self.armed[1], 1)
            self.armed = None

    def outcome(self) -> Trained:
        losses, values, states = self.result()
        return losses, *copy.deepcopy((values, states))

    def inject(self, point: FaultPoint, nth: int, effect: FaultEffect = FaultEffect.error, value: int = 5) -> None:
        self.backend._store.room.arena._engine.inject([(point, nth, 1, effect, value)])

    def fails(self) -> ZeroGraphError | None:
        """Whether a step does, and how; without what its traceback keeps."""
        try:
            self.step()
        except ZeroGraphError as error:
            return error.with_traceback(None)
        return None

    @property
    def half_done(self) -> bool:
        return bool(self.backend._store.half_done)


def _every_transfer(folder: str, engine: str, offloaded: dict[str, Any]) -> Counter[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROGRAPH_IO", engine)
        patch.setattr(slots, "SLOT", 32 * 2**10)
        training = Faulty(folder, offloaded)
    training.step()
    truth, failed = training.outcome(), Counter[str]()
    for point in (FaultPoint.read, FaultPoint.write):
        for nth in itertools.count(1):
            training.load()
            code = (errno.EIO, errno.ENOSPC)[nth % 2]
            training.inject(point, nth, FaultEffect.error, code)
            error = training.fails()
            if error is None:
                break  # there is no such transfer
            assert isinstance(error, StorageError) and error.errno == code, error
            assert f"cannot {point.name} " in str(error) and str(error.filename).endswith("(unnamed slab)")
            failed[training.place + " half done" * training.half_done] += 1
            if training.half_done:
                for goes_on in (training.step, training.optimizer.step):
                    with pytest.raises(StorageError, match=r"ended half done(?s:.*)load a checkpoint"):
                        goes_on()
                training.load()
            training.step()
            _same(training.outcome(), truth)
            if nth % 3 == 0:  # what is short is transferred to its end
                training.load()
                training.inject(point, nth, FaultEffect.cut, 4096)
                training.step()
                _same(training.outcome(), truth)
        failed[point.name] = nth - 1
    return failed


@pytest.mark.parametrize(
    ("engine", "offloaded"), [(ENGINES[0], BEHIND), (ENGINES[-1], OFF)], ids=["threads, behind a host", "nvme"]
)
def test_any_transfer_of_a_step_may_fail(engine: str, offloaded: dict[str, Any], tmp_path: Path) -> None:
    (failed,) = run(1, _every_transfer, str(tmp_path), engine, offloaded)
    places = {f"{kind} {micro}" for kind in ("forward", "backward") for micro in range(2)}
    assert places | {"update", "update half done", "read", "write"} == failed.keys()
    assert failed["read"] > 20 and failed["write"] > 10


AT_PLACES = [
    (FaultPoint.read, "forward 0"),
    (FaultPoint.read, "backward 0"),
    (FaultPoint.write, "backward 1"),
    (FaultPoint.read, "update"),
]
"""The first read of an update is for the norm, which all ranks take before any changes a parameter."""


def _on_one_rank(folder: str, offloaded: dict[str, Any]) -> list[str]:
    training, reported = Faulty(folder, offloaded), list[str]()
    training.step()
    truth = training.outcome()
    for point, place in AT_PLACES:
        training.load()
        training.armed = (place, point) if _rank() == 0 else None
        start = time.monotonic()
        error = training.fails()
        reported.append(f"{type(error).__name__} in {training.place}: {error}")
        assert time.monotonic() - start < 10 and not training.half_done
        training.step()
        _same(training.outcome(), truth)
    return reported


@pytest.mark.parametrize("offloaded", [OFF, BEHIND], ids=["nvme", "behind a host"])
def test_a_transfer_that_fails_on_one_rank_is_an_error_on_all_who_then_go_on(
    offloaded: dict[str, Any], tmp_path: Path
) -> None:
    first, second = run(2, _on_one_rank, str(tmp_path), offloaded, timeout=60)
    for (_, place), mine, theirs in zip(AT_PLACES, first, second, strict=True):
        assert mine.startswith(f"StorageError in {place}: cannot ")
        assert theirs.startswith(f"RankError in {place}: ") and "rank 0 failed: " in theirs
        assert "StorageError: cannot" in theirs and "Input/output error" in theirs


def _update_of_one_rank(folder: str, starts: bool) -> list[str]:
    """One rank has updated everything, the other one a part."""
    training = Faulty(folder, OFF)
    training.starts = starts
    training.step()
    truth = training.outcome()
    training.load()
    training.armed = ("update", FaultPoint.write) if _rank() == 0 else None
    start = time.monotonic()
    reported = [str(training.fails()) for _ in range(3 + _rank())]
    assert time.monotonic() - start < 20 and training.half_done == (_rank() == 0)
    training.load()
    training.step()
    _same(training.outcome(), truth)
    return reported


@pytest.mark.parametrize("starts", [False, True], ids=["step", "start_step"])
def test_after_a_failed_update_of_one_rank_all_load_a_checkpoint_and_go_on(starts: bool, tmp_path: Path) -> None:
    first, second = run(2, _update_of_one_rank, str(tmp_path), starts, timeout=60)
    assert first[0].startswith("cannot write") and second[0] == "None"
    assert "rank 0 failed: in AdamW.step(): StorageError: cannot write" in second[1]
    for mine, theirs in zip(first[1:], second[2:], strict=True):
        assert "ended half done (StorageError: cannot write" in mine and "load a checkpoint" in mine
        assert "rank 0 failed: StorageError: the last update ended half done" in theirs


# ---- the process ends


def _batch(step: int) -> Tensor:
    return torch.randint(0, 37, (3, 8), generator=torch.Generator().manual_seed(step))


def _trains_and_saves(folder: Path, steps: int, saves: bool, pipe: Connection) -> None:
    """Go on from the last checkpoint; sends the number and the loss of every step, each of which is then saved."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, saved = Small(), sorted((folder / "saved").iterdir())
    backend = zerograph.backend(stage=3, compute="eager", offload="parameters", tier="nvme", path=str(folder / "nvme"))
    compiled, optimizer = torch.compile(model, backend=backend), adamw(model)
    compiled(_batch(0)).backward()
    optimizer.step()  # everything has its place
    if saved:
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(parts, checkpoint_id=saved[-1])
        set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    for step in range(int(saved[-1].name) + 1 if saved else 1, steps):
        optimizer.zero_grad()
        loss = compiled(_batch(step))
        loss.backward()
        optimizer.step()
        pipe.send((step, loss.item()))
        if saves:
            parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            shutil.rmtree(folder / "writing", ignore_errors=True)
            dcp.save(parts, checkpoint_id=folder / "writing")
            (folder / "writing").rename(folder / "saved" / f"{step:05}")
    pipe.close()


def _started(folder: Path, steps: int, saves: bool) -> tuple[BaseProcess, Connection]:
    for name in ("nvme", "saved"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    ours, theirs = server().Pipe(duplex=False)
    process = server().Process(target=_trains_and_saves, args=(folder, steps, saves, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _reported(pipe: Connection) -> Iterator[tuple[int, float]]:
    """What a process has sent, to its end."""
    with contextlib.suppress(EOFError):
        while True:
            yield pipe.recv()


def test_a_run_that_is_killed_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    losses, last = dict[int, float](), 0
    for _ in range(3):
        process, pipe = _started(tmp_path / "killed", 10**5, saves=True)
        first, loss = pipe.recv()
        assert first in (last, last + 1)  # the last step that was told may not have been saved
        assert not list((tmp_path / "killed" / "nvme").iterdir())
        time.sleep(random.uniform(0.0, 0.3))
        process.kill()
        process.join()
        reported = {first: loss, **dict(_reported(pipe))}
        assert all(losses.setdefault(step, loss) == loss for step, loss in reported.items())
        last = max(reported)
    process, pipe = _started(tmp_path / "whole", last + 1, saves=False)
    assert dict(_reported(pipe)) == losses
    process.join()
