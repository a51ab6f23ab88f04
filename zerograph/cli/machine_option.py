"""``--machine NAME|FILE`` with ``--memory``, for every command that plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zerograph.machine import PRESETS, Machine, machine_named


def named_or_file(name: str, memory: int | None) -> Machine:
    """The preset, or what `zerograph bench` wrote; with ``memory`` bytes per device when that is given.

    Raises:
        ConfigError: neither a preset nor a machine file.
    """
    path = Path(name)
    if name in PRESETS or not path.is_file():
        return machine_named(name, memory)
    machine = Machine.from_json(path.read_text(errors="replace"))
    return machine if memory is None else replace(machine, device_memory=memory)
