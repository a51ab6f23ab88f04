"""Machines as files: what no machine is like is refused before anything is computed with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zerograph.core.errors import ConfigError
from zerograph.core.machine import PRESETS, Machine


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_read_back(name: str) -> None:
    assert Machine.from_json(PRESETS[name].to_json()) == PRESETS[name]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"device_memory": "80GiB"}, "device_memory is '80GiB'"),
        ({"device_memory": -5}, "device_memory is -5"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"intra": {"rate": 0, "latency": 0}}, "rate of intra is 0"),
        ({"h2d": {"rate": 1e9, "latency": -1}}, "latency of h2d is -1"),
        ({"matmul": {"float32": 1e12}}, "matmul has not one rate for each of"),
        ({"device_bandwidth": None}, "device_bandwidth is None"),
    ],
    ids=str,
)
def test_what_no_machine_is_like_is_refused(change: dict[str, Any], told: str) -> None:
    data = json.loads(PRESETS["h100-80gb"].to_json()) | change
    with pytest.raises(ConfigError, match=told):
        Machine.from_json(json.dumps(data))
