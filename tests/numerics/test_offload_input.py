"""What users do with offload beside the plain loop: it works as in memory, or an error says what to do."""

from __future__ import annotations

import copy
import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from numerics.test_offload import OFF, Run, _rank, _same, adamw
from ranks import run
from torch import nn
from torch.optim import Optimizer

import zerograph
from zerograph.core.errors import StorageError, UnsupportedError, ZeroGraphError

ALL = {"stage": 3, **OFF, "offload": "parameters"}


def _both(folder: str, make: Callable[[nn.Module], Optimizer], trains: Callable[[Run], None]) -> None:
    runs = [Run(make, stage=3), Run(make, **ALL, path=folder)]
    for training in runs:
        trains(training)
    _same(*(training.result() for training in runs))


def _twice_through_one_graph(training: Run) -> None:
    training.steps(1)
    loss = training.compiled(torch.arange(24).view(3, 8) % 37)
    loss.backward(retain_graph=True)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=False)
    training.steps(1)


def _skips_a_step(training: Run) -> None:
    training.steps(1)
    training.backward()
    training.optimizer.zero_grad()
    training.steps(2)


def _changes_states_before_the_step(training: Run) -> None:
    """What an update needs first is read while the backward runs, which must not undo this."""
    training.steps(2)
    training.backward()
    with torch.no_grad():
        for param in training.model.parameters():
            param.mul_(0.5)
            if "exp_avg" in training.optimizer.state[param]:  # the forward reads it
                training.optimizer.state[param]["exp_avg"].data.add_(1e-3)
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.steps(1)


def _loads_between_backward_and_step(training: Run) -> None:
    training.steps(2)
    model, states = (copy.deepcopy(part.state_dict()) for part in (training.model, training.optimizer))
    training.steps(1)
    training.backward()
    training.model.load_state_dict(model)
    training.optimizer.load_state_dict(states)
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.steps(1)


def _removes_the_folder(training: Run) -> None:
    training.steps(1)
    if training.backend.config.path:
        torch.distributed.barrier()
        shutil.rmtree(training.backend.config.path[0], ignore_errors=True)
    training.steps(2)


def _each(folder: str, trains: Callable[[Run], None]) -> None:
    _both(folder, adamw, trains)


@pytest.mark.parametrize(
    "trains",
    [
        _twice_through_one_graph,
        _skips_a_step,
        _removes_the_folder,
        _changes_states_before_the_step,
        _loads_between_backward_and_step,
    ],
)
def test_loops_that_do_something_else(trains: Callable[[Run], None], tmp_path: Path) -> None:
    folder = tmp_path / "offloaded"
    folder.mkdir()
    run(2, _each, str(folder), trains)


def foreach(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def _two_steps(training: Run) -> None:
    training.steps(2)


def _foreach(folder: str) -> None:
    _both(folder, foreach, _two_steps)


def test_foreach_steps_through_mappings(tmp_path: Path) -> None:
    run(2, _foreach, str(tmp_path))


def _own_folder(folder: str) -> None:
    own = os.path.join(folder, str(_rank()))
    os.mkdir(own)
    _both(own, adamw, _two_steps)


def test_ranks_may_have_folders_of_their_own(tmp_path: Path) -> None:
    run(2, _own_folder, str(tmp_path))


def lbfgs(model: nn.Module) -> Optimizer:
    return torch.optim.LBFGS(model.parameters())


def muon(model: nn.Module) -> Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2])


def _refused(folder: str, make: Callable[[nn.Module], Optimizer]) -> None:
    training = Run(make, **ALL, path=folder)
    training.backward()
    with pytest.raises(UnsupportedError):
        training.optimizer.step(lambda: training.losses[-1])


@pytest.mark.parametrize("make", [lbfgs, muon])
def test_optimizers_that_cannot_step_are_refused(make: Callable[[nn.Module], Optimizer], tmp_path: Path) -> None:
    run(2, _refused, str(tmp_path), make)


def _over_both(folder: str) -> None:
    """One optimizer over a model that is offloaded and one that is not."""
    results = []
    for more in ({}, {**OFF, "offload": "parameters", "path": folder}):
        training = Run(adamw, stage=3, **more)
        torch.manual_seed(1)
        plain = nn.Linear(37, 5)
        training.optimizer.add_param_group({"params": plain.parameters(), "lr": 1e-3})
        for _ in range(2):
            training.backward()
            plain(torch.ones(2, 37)).square().sum().backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
        results.append((training.result(), plain.weight.detach().clone()))
    _same(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_an_optimizer_over_an_offloaded_and_a_plain_model(tmp_path: Path) -> None:
    run(2, _over_both, str(tmp_path))


def _forked(folder: str) -> None:
    """A child that reads nothing of it ends, and training goes on: data loaders fork."""

    def trains(training: Run) -> None:
        training.steps(1)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        training.steps(2)

    _both(folder, adamw, trains)


def test_a_process_that_forks_goes_on(tmp_path: Path) -> None:
    run(2, _forked, str(tmp_path))


def _less_room(folder: str) -> str:
    training = Run(adamw, **ALL, path=folder, nvme="64KiB" if _rank() == 1 else "64MiB")
    with pytest.raises(ZeroGraphError) as caught:
        training.steps(1)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_one_rank_with_less_room_is_an_error_on_all(tmp_path: Path) -> None:
    first, second = run(2, _less_room, str(tmp_path), timeout=60)
    assert first == second and first.startswith("InfeasibleError") and "may use 60.2 KiB" in first


def _unusable(folder: str) -> list[tuple[int | None, str]]:
    file, found = Path(folder) / "file", []
    file.write_text("")
    # /sys is one that root may not write to either.
    for path, nvme in ((str(file), None), (f"{folder}/missing", None), ("/sys/kernel", None), (folder, "900TiB")):
        with pytest.raises(StorageError) as caught:
            Run(adamw, **ALL, path=path, nvme=nvme).backward()
        assert caught.value.filename == path and caught.value.hint
        found.append((caught.value.errno, str(caught.value)))
    return found


def test_folders_that_cannot_be_used_are_said_at_the_first_call(tmp_path: Path) -> None:
    ((file, missing, readonly, full),) = run(1, _unusable, str(tmp_path))
    assert (file[0], missing[0], full[0]) == (errno.ENOTDIR, errno.ENOENT, errno.ENOSPC)
    assert readonly[0] in (errno.EACCES, errno.EPERM, errno.EROFS)
    assert "needed are 989560.4 GB" in full[1] and "offload less" in full[1]


def stock(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _two_backends_in_turn(folder: str) -> None:
    """Offload that is asked for after the first call, by a backend beside the first one."""
    results = []
    for offloaded in (False, True):
        training = Run(adamw, stage=3)
        training.steps(1)
        if offloaded:
            first = training.compiled
            other = zerograph.backend(compute="eager", bucket_size="20KiB", **ALL, path=folder)
            second = torch.compile(training.model, backend=other)
            for training.compiled in (second, first, second):
                training.steps(1)
            assert other._store.bytes()["parameters"] > 0
        else:
            training.steps(3)
        results.append(training.result())
    _same(*results)


def test_offload_after_the_first_call(tmp_path: Path) -> None:
    run(1, _two_backends_in_turn, str(tmp_path))


def _in_float64(folder: str) -> None:
    results = []
    for more in ({"stage": 3}, {**ALL, "path": folder}):
        training = Run(stock, model_dtype=torch.float64, **more)
        training.steps(3)
        results.append(training.result())
    _same(*results)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no folder in memory")
def test_float64_and_a_folder_in_memory() -> None:
    """No kernel of ZeroGraph's updates float64; torch's do."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        run(2, _in_float64, folder)


def _resident(kind: str) -> int:
    """Bytes of this process's memory, of ``kind``: RssFile is what it has touched of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))


def _saves(folder: str) -> list[int]:
    size, resident = 1024, list[int]()
    model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(6)))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    compiled = torch.compile(model, backend=zerograph.backend(compute="eager", **ALL, path=folder))
    optimizer = zerograph.optim.AdamW(model.parameters())
    for step in range(12):
        compiled(torch.ones(2, size)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        resident.append(_resident("RssFile"))
        if step % 4 == 3:  # of what it reads the frozen parameters are not written by the next step
            torch.save([model.state_dict(), optimizer.state_dict()], Path(folder) / "checkpoint")
            assert _resident("RssFile") > resident[-1] + 4 * 2**20 * 6
    return resident


@pytest.mark.slow
def test_checkpoints_leave_nothing_in_memory(tmp_path: Path) -> None:
    (resident,) = run(1, _saves, str(tmp_path))
    assert max(resident[2:]) < resident[1] + 2**20
