"""Facts that instructions state, as lowering sets them, so that nobody who reads a program derives them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
from numerics.test_tiles import Net, made

from zerograph.core.instructions import BeginUpdate, Move, Reduce
from zerograph.core.machine import machine_named
from zerograph.core.plan import ParamTile

SPLIT = replace(machine_named("cpu"), split=True)


def _instructions(**options: Any) -> dict[str, list[Any]]:
    """By class, and moves by operation, those of a step of :class:`Net` on one of two ranks."""
    found: dict[str, list[Any]] = {}
    frame = harness.dry_run(2, made, Net, bucket_size=4, **options).frame
    for program in frame.programs.values():
        for each in program.instructions:
            kind = each.operation if isinstance(each, Move) else type(each).__name__
            found.setdefault(f"{program.kind} {kind}", []).append(each)
    return found


def test_buckets_say_how_long_they_stay_resident() -> None:
    use, step = (_instructions(stage=stage) for stage in (3, 2))
    assert not any(each.resident or each.fetched for each in use["forward Gather"] + use["backward Gather"])
    assert not any(each.resident or each.ends for each in use["forward Free"] + use["backward Free"])
    assert not any(each.resident for each in use["forward WaitGather"] + use["backward WaitGather"])
    assert not any(each.resident for each in step["forward Gather"])
    assert all(each.resident for each in step["backward Gather"])
    assert all(each.resident and not each.ends for each in step["forward Free"] + step["backward Free"])
    assert all(each.resident for each in step["forward WaitGather"] + step["backward WaitGather"])
    for wait in use["backward WaitReduce"]:
        assert wait.updatable == tuple(range(len(wait.writes))) and not wait.leaves


@pytest.mark.parametrize("stage", [1, 3])
def test_updates_begin_behind_the_last_instruction_of_their_bucket(stage: int) -> None:
    backward = harness.dry_run(2, made, Net, bucket_size=4, stage=stage).frame.programs["backward"].instructions
    reduced = {each.bucket for each in backward if isinstance(each, Reduce)}
    begins = {each.bucket: place for place, each in enumerate(backward) if isinstance(each, BeginUpdate)}
    assert begins.keys() == reduced and len(reduced) > 1
    for bucket, place in begins.items():
        last = max(at for at, each in enumerate(backward) if getattr(each, "bucket", -1) == bucket)
        assert last == place and getattr(backward[place - 1], "bucket", -1) == bucket


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_moves_say_where_their_tier_is_and_which_is_the_last(tier: str, tmp_path: Path) -> None:
    offloaded: dict[str, Any] = {"path": str(tmp_path)} if tier == "nvme" else {}
    found = _instructions(stage=3, offload="parameters", tier=tier, machine=SPLIT, **offloaded)
    assert all(each.fetched for each in found["forward Gather"] + found["backward Gather"])
    fetches, spills = found["forward fetch"] + found["backward fetch"], found["backward spill"]
    assert all(each.offload_tier == tier and each.staged == (tier == "nvme") for each in fetches + spills)
    assert all(each.leaves and not each.updatable for each in found["backward WaitReduce"])
    assert all(each.complete for each in spills)
    for each in found.get("forward read", []) + found.get("backward write", []):
        assert each.offload_tier == "nvme" and not each.staged
    assert ("backward write" in found) == (tier == "nvme")


def test_of_tiles_the_last_completes_a_gradient() -> None:
    found = _instructions(stage=3, offload="parameters", tier="host", machine=SPLIT, tile=3)
    spills = [each for each in found["backward spill"] if isinstance(each.params[0], ParamTile)]
    by_gradient = {each.writes: [other for other in spills if other.writes == each.writes] for each in spills}
    assert by_gradient and any(len(tiles) > 1 for tiles in by_gradient.values())
    for tiles in by_gradient.values():
        assert [each.complete for each in tiles] == [False] * (len(tiles) - 1) + [True]
