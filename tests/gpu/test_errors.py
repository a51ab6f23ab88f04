"""Disks that fail where states wait behind an accelerator: an error that names them, and training goes on as before."""

from __future__ import annotations

from pathlib import Path

from gpu.accelerator import on_it, watched
from numerics.test_offload import _same
from numerics.test_offload_faults import AT_PLACES, Faulty, _every_transfer
from ranks import run

from zerograph.core.errors import StorageError

BEHIND = {"tier": "nvme"}
"""On NVMe behind the host of an accelerator."""


def _every_transfer_of_a_step(folder: Path) -> None:
    with watched() as races:
        failed = _every_transfer(str(folder), "threads", BEHIND)
    assert not races
    places = {f"{kind} {micro}" for kind in ("forward", "backward") for micro in range(2)}
    assert places | {"update", "update half done", "read", "write"} == failed.keys()


def test_any_transfer_of_a_step_may_fail(tmp_path: Path) -> None:
    run(1, on_it, _every_transfer_of_a_step, tmp_path)


def _on_all_ranks(folder: Path) -> None:
    """At the same place. Ranks that differ by a collective do not go on (test_recovery.py)."""
    with watched() as races:
        training = Faulty(str(folder), BEHIND)
        training.step()
        truth = training.outcome()
        for point, place in AT_PLACES:
            training.load()
            training.armed = (place, point)
            assert isinstance(training.fails(), StorageError)
            assert training.place == place and not training.half_done
            training.step()
            _same(training.outcome(), truth)
    assert not races


def test_a_transfer_that_fails_on_all_ranks(tmp_path: Path) -> None:
    run(2, on_it, _on_all_ranks, tmp_path, timeout=60)
