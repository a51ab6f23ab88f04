"""Snapshots of a device's memory are given names; tests/gpu/test_train.py records some."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerograph.core.errors import ConfigError
from zerograph.runtime.memory_history import During, MemoryHistory, with_names

CODE = [{"filename": "model.py", "line": 7, "name": "forward"}]
GATHER, UPDATE = (
    During(10_000, 19_999, "gather b", "forward", 3),
    During(30_000, 40_000, "optimizer update", "update", 0),
)


def event(action: str, address: int, time: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": 64, "stream": 0, "time_us": time, "frames": CODE}


def block(address: int, state: str = "active_allocated") -> dict[str, Any]:
    return {"address": address, "size": 64, "requested_size": 60, "state": state, "frames": CODE}


def snapshot() -> dict[str, Any]:
    """Of two devices that look the same."""
    trace = [
        event("alloc", 512, 10), event("free_requested", 512, 19), event("free_completed", 512, 19),
        event("alloc", 512, 25), event("alloc", 1024, 35),
    ]  # fmt: skip
    blocks = [block(256), block(512), block(768, "inactive"), block(1024)]
    return {
        "segments": [{"device": device, "address": 256, "blocks": blocks} for device in (0, 1)],
        "device_traces": [trace, trace],
    }


def names_of(there: dict[str, Any]) -> list[str]:
    """Of the frames that were added, which come first."""
    assert there["frames"][-1:] == CODE
    return [frame["name"] for frame in there["frames"][:-1]]


def test_allocations_have_the_instruction_that_ran() -> None:
    found = with_names(snapshot(), 1, [GATHER, UPDATE], {})
    assert [names_of(each) for each in found["device_traces"][1]] == [
        ["gather b"], ["gather b"], ["gather b"], [], ["optimizer update"]
    ]  # fmt: skip
    assert found["device_traces"][1][0]["frames"][0] == {"filename": "forward", "line": 3, "name": "gather b"}
    blocks = found["segments"][1]["blocks"]
    assert [names_of(each) for each in blocks] == [[], [], [], ["optimizer update"]]


def test_memory_has_the_tensors_that_lie_in_it() -> None:
    held = {256: "parameter a", 300: "parameter b", 1024: "exp_avg of a", 768: "what is gone", 2048: "elsewhere"}
    found = with_names(snapshot(), 0, [GATHER, UPDATE], held)
    blocks = found["segments"][0]["blocks"]
    assert [names_of(each) for each in blocks] == [
        ["parameter a and 1 more"], [], [], ["exp_avg of a", "optimizer update"]
    ]  # fmt: skip
    assert names_of(found["device_traces"][0][-1]) == ["exp_avg of a", "optimizer update"]


def test_other_devices_and_the_given_snapshot_stay_as_they_are() -> None:
    given = snapshot()
    found = with_names(given, 0, [GATHER], {256: "parameter a"})
    assert given == snapshot()
    assert found["device_traces"][1] == given["device_traces"][1] and found["segments"][1] == given["segments"][1]


def test_a_cpu_has_no_history() -> None:
    with pytest.raises(ConfigError, match=r"no history of allocations on cpu") as caught:
        MemoryHistory(torch.device("cpu"))
    assert "--memory-viz" in str(caught.value)
