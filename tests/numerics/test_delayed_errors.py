"""Where updates cannot be delayed, what becomes of one that fails, and of misuse that is seen."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics.compare import full
from numerics.test_delayed import BF16, adamw
from numerics.test_offload import BEHIND, HOST, OFF, Run, _rank, _same
from ranks import refused, run
from torch import Tensor, nn

import zerograph
from zerograph.core.errors import CollectiveMismatch, RankError, StorageError, ZeroGraphError
from zerograph.optim import host, stream
from zerograph.runtime.torch_private import local_tensor

TESTS = Path(__file__).parents[1]


def _refused(options: dict[str, Any]) -> None:
    Run(partial(adamw, delayed=True, warmup=5), **options).steps(1)


@pytest.mark.parametrize(
    ("world_size", "options", "why"),
    [
        (2, {"stage": 0}, "no copies of them"),
        (2, {"stage": 3}, "no copies of them"),
        (1, {"stage": 3, **HOST, "offload": "parameters"}, "no copies of them"),
        (2, {"stage": 3, **HOST, "update": "device"}, 'update="device" needs the device'),
        (1, {"stage": 3, **OFF}, "no copies of them in memory"),
        (1, {"stage": 3, **BEHIND, "offload": "gradients"}, "gradients on NVMe lie where"),
        (2, {"stage": 3, **OFF, "offload": "parameters", **BF16}, "gradients on NVMe lie where"),
    ],
)
def test_where_nothing_runs_beside_programs(world_size: int, options: dict[str, Any], why: str, tmp_path: Path) -> None:
    more = {"path": str(tmp_path)} if options.get("tier") == "nvme" else {}
    said = rf"nothing can be updated while the model computes: .*{why}(?s:.*)leave delayed out"
    for text in run(world_size, refused, _refused, {**options, **more}):
        assert re.search(said, text), text


def _fails(*_: Any) -> None:
    raise MemoryError("no room")


def _an_update_fails(placement: dict[str, Any]) -> None:
    training = Run(partial(adamw, delayed=True), stage=3, **placement)
    training.steps(2)
    opt: Any = training.optimizer
    kept = copy.deepcopy(({k: full(v) for k, v in training.model.state_dict().items()}, opt.state_dict()))
    batch = training.batches.get_state()
    training.steps(2)
    truth = copy.deepcopy(training.result())
    training.backward()
    with pytest.MonkeyPatch.context() as patch:
        if _rank() == 0:
            patch.setattr(host, "update_arrived", _fails)
        opt.step()
        opt.zero_grad()
        with pytest.raises((MemoryError, RankError)) as caught:
            training.steps(2)
    assert type(caught.value) is (MemoryError if _rank() == 0 else RankError)
    with pytest.raises((StorageError, RankError), match=r"half done|no room"):
        training.backward()
    if _rank() == 0:
        with pytest.raises(StorageError, match=r"ended half done(?s:.*)load a checkpoint"):
            opt.step()
    training.model.load_state_dict(kept[0])
    opt.load_state_dict(kept[1])
    opt.zero_grad()
    training.losses = training.losses[:2]
    training.batches.set_state(batch)
    training.steps(2)
    _same(truth, training.result())


@pytest.mark.parametrize("placement", [HOST, {**OFF, **BF16}], ids=["host", "nvme"])
def test_an_update_that_fails_is_heard_of_and_needs_a_checkpoint(placement: dict[str, Any], tmp_path: Path) -> None:
    run(2, _an_update_fails, placement if placement is HOST else {**placement, "path": str(tmp_path)}, timeout=90)


class _Neighbours(nn.Module):
    """Two parameters of one bucket, of which a step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.first(x)
        return (self.second(x) if both else x).square().mean()


def _neighbour_written_to(folder: str, how: str) -> None:
    torch.manual_seed(0)
    model = _Neighbours()
    backend = zerograph.backend(stage=1, **OFF, path=folder, nvme="64MiB", **BF16)
    model.compile(backend=backend)
    opt = zerograph.optim.AdamW(model.parameters(), lr=1e-2, delayed=True)
    for both in (True, True, False):
        model(torch.randn(4, 64, dtype=torch.bfloat16), both).backward()
        gate, update = threading.Event(), host.update_arrived

        def waits(*args: Any, gate: threading.Event = gate, update: Any = update) -> None:
            assert gate.wait(60)
            update(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host, "update_arrived", waits)
            opt.step()
        if both:
            gate.set()
    values = torch.full((64, 64), 3.0)
    if how == "load":
        threading.Timer(0.2, gate.set).start()
        model.second.load_state_dict({"weight": values})  # waits for the update
        opt.settle()
        assert torch.equal(full(model.second.weight), values)
        return
    with torch.no_grad():
        local_tensor(model.second.weight).fill_(3.0)
    gate.set()
    with pytest.raises(ZeroGraphError, match=r"1 parameters, .* were written to before the next step, in which AdamW"):
        opt.settle()


@pytest.mark.parametrize("how", ["load", "write"])
def test_what_is_written_back_with_others_settles_or_is_an_error(how: str, tmp_path: Path) -> None:
    run(2, _neighbour_written_to, str(tmp_path), how)


def _a_stream_fails(folder: str, late: int | None) -> None:
    training = Run(partial(adamw, delayed=True), stage=3, **OFF, **BF16, path=folder)
    training.steps(2)
    opt: Any = training.optimizer
    kept = copy.deepcopy(({k: full(v) for k, v in training.model.state_dict().items()}, opt.state_dict()))
    training.backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "through_slots", _fails)
        opt.step()
        opt.zero_grad()
        training.backend._store.slots.wait()
        if _rank() == late:
            time.sleep(1.0)  # it hears of the other's failure before it sees its own
        with pytest.raises((MemoryError, RankError), match="no room"):
            training.backward()
    training.model.load_state_dict(kept[0])
    opt.load_state_dict(kept[1])
    opt.zero_grad()
    training.steps(1)


@pytest.mark.parametrize("late", [None, 1])
def test_a_stream_that_fails_says_why_and_a_checkpoint_loads(late: int | None, tmp_path: Path) -> None:
    run(2, _a_stream_fails, str(tmp_path), late, timeout=90)


def _written_to() -> None:
    training = Run(partial(adamw, delayed=True), stage=3, **HOST)
    opt: Any = training.optimizer
    training.steps(2)
    opt.settle()
    with torch.no_grad():
        training.model.norm.weight.mul_(0.9)  # type: ignore[union-attr, operator]
    training.steps(1)
    training.backward()
    opt.settle()
    with torch.no_grad():
        training.model.norm.weight.mul_(0.9)  # type: ignore[union-attr, operator]
    opt.step()
    with torch.no_grad():
        training.model.norm.weight.mul_(0.9)  # type: ignore[union-attr, operator]
    with pytest.raises(
        ZeroGraphError, match=r"1 parameters, .* \[40\], were written to before the next step(?s:.*)settle\(\)"
    ):
        opt.settle()
    with pytest.raises(StorageError, match="half done"):
        opt.step()


def test_a_parameter_that_is_written_to_meanwhile_is_an_error() -> None:
    run(1, _written_to)


def _alone() -> None:
    training = Run(partial(adamw, delayed=True), stage=3, **HOST)
    training.steps(2)
    if _rank() == 0:
        training.model.state_dict()
    with pytest.raises((CollectiveMismatch, RankError), match=r"optimizer steps|delayed=True"):
        training.backward()


def test_a_rank_that_looks_alone_is_an_error() -> None:
    run(2, _alone, timeout=60)


def _replaced() -> list[float]:
    training = Run(partial(adamw, delayed=True), stage=3, **HOST)
    training.steps(3)
    training.optimizer = adamw(training.model, delayed=True)  # the other one has an update under way
    training.losses = []
    training.steps(2)
    return training.losses


def _settled_and_replaced() -> list[float]:
    training = Run(partial(adamw, delayed=True), stage=3, **HOST)
    training.steps(3)
    first: Any = training.optimizer
    training.optimizer = adamw(training.model, delayed=True)
    training.losses = []
    training.backward()
    first.settle()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.steps(1)
    return training.losses


def test_an_update_is_not_lost_with_its_optimizer() -> None:
    assert run(2, _replaced) == run(2, _settled_and_replaced)


@pytest.mark.slow
def test_a_process_ends_with_an_update_under_way() -> None:
    script = f"""
        import sys
        sys.path.insert(0, {str(TESTS)!r})
        from functools import partial
        from numerics.test_delayed import adamw
        from numerics.test_offload import HOST, Run
        training = Run(partial(adamw, delayed=True), stage=2, **HOST)
        training.steps(3)
        assert training.optimizer.late.changing
        print("trained")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
