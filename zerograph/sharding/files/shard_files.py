"""Reading one rank's rows from full safetensors files."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from zerograph.core.errors import CheckpointError
from zerograph.runtime.dtensors import own_slices
from zerograph.sharding.files.export import DTYPES
from zerograph.sharding.files.room import Room
from zerograph.sharding.shards import agree, is_first, local_of

log = logging.getLogger(__name__)


@dataclass(slots=True)
class UnmadeTensor:
    """A parameter or buffer without memory: its names, where it lives, and this rank's part once it has values;
    ``leaves`` if it is a shard, which may live off the device, ``on_host`` if that is on the host of an accelerator."""

    tensor: Tensor
    persistent: bool
    names: list[str] = field(default_factory=list)
    at: list[tuple[nn.Module, str]] = field(default_factory=list)
    local: Tensor | None = None
    leaves: bool = False
    on_host: bool = False


def read_files(
    slots: Sequence[UnmadeTensor],
    files: Sequence[str],
    room: Room,
    group: dist.ProcessGroup | None,
    *,
    strict: bool,
) -> None:
    """Fill ``slots`` from ``files``, each rank with its own rows. Collective only in agreeing on failures.

    Args:
        strict: every parameter and persistent buffer must be there.

    Raises:
        CheckpointError: on every rank, when any rank cannot read, or names, shapes or dtypes do not fit.
    """
    with ExitStack() as stack:
        found: dict[int, tuple[Any, str]] = {}
        missing: list[str] = []

        def match() -> None:
            found.update(_match(slots, _open_all(files, stack), strict))
            missing.extend(slot.names[0] for slot in slots if slot.persistent and id(slot) not in found)
            _refuse_part_of_a_checkpoint(missing, files)

        agree(group, match, CheckpointError)
        if missing and is_first(group):
            log.warning("the files lack %s, which are initialized", _some("parameters or buffers", missing))
        agree(group, lambda: _read_all([s for s in slots if id(s) in found], found, room), CheckpointError)


def _open_all(files: Sequence[str], stack: ExitStack) -> dict[str, Any]:
    """The open file of each name, which no other file may hold: else their order would choose the weights."""
    holders: dict[str, Any] = {}
    paths: dict[str, str] = {}
    for path in files:
        if Path(path).is_dir():
            hint = f'files=sorted(Path({path!r}).glob("*.safetensors"))'
            raise CheckpointError(f"cannot read {path}: it is a folder", hint)
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {path}: {error}", "give full safetensors files") from error
        for name in file.keys():  # noqa: SIM118  # a file is no mapping
            if name in paths:
                raise CheckpointError(
                    f"{name} is in {paths[name]} and in {path}",
                    "give the files of one checkpoint, as its model.safetensors.index.json lists them",
                )
            holders[name], paths[name] = file, path
    return holders


def _refuse_part_of_a_checkpoint(missing: Sequence[str], files: Sequence[str]) -> None:
    """Names that the index beside ``files`` lists are in files that were not given, and nothing to initialize."""
    for folder in sorted({Path(path).parent for path in files}) if missing else ():
        index = folder / "model.safetensors.index.json"
        try:
            listed = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
            elsewhere = {listed[name] for name in missing if name in listed}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"cannot read {index}: {error!r}", "download it again, or remove it") from error
        if elsewhere:
            held = _some("parameters or buffers", [name for name in missing if name in listed])
            raise CheckpointError(
                f"{index} has {held} in files that were not given", f"add {', '.join(sorted(elsewhere))}"
            )


def _match(slots: Sequence[UnmadeTensor], holders: dict[str, Any], strict: bool) -> dict[int, tuple[Any, str]]:
    """The file and the name to read each slot from, by ``id`` of the slot."""
    found = {}
    for slot in slots:
        name = next((n for n in slot.names if n in holders), None)
        if name is not None:
            found[id(slot)] = (holders[name], name)
    missing = [s.names[0] for s in slots if s.persistent and id(s) not in found] if strict else []
    unexpected = sorted(holders.keys() - {n for s in slots for n in s.names})
    if missing or unexpected:
        raise CheckpointError(
            "the files do not fit the model: "
            + "; ".join(_some(kind, n) for kind, n in (("missing", missing), ("unexpected", unexpected)) if n),
            "names must be those of the plain model's state_dict(); "
            "pass init= as well to initialize what the files do not hold",
        )
    for slot in slots:
        if id(slot) in found:
            _check(slot, *found[id(slot)])
    return found


def _some(kind: str, names: list[str]) -> str:
    shown = 5
    more = f", and {len(names) - shown} more" if len(names) > shown else ""
    return f"{len(names)} {kind} ({', '.join(names[:shown])}{more})"


def _check(slot: UnmadeTensor, file: Any, name: str) -> None:
    stored = file.get_slice(name)
    if list(stored.get_shape()) != list(slot.tensor.shape):
        raise CheckpointError(
            f"{name} has shape {list(stored.get_shape())} in the files and {list(slot.tensor.shape)} in the model",
            "build the model with the configuration that the files were written with",
        )
    dtype = next((d for d, text in DTYPES.items() if text == stored.get_dtype()), None)
    wanted = slot.tensor.dtype
    if dtype == wanted:
        return
    if "F8_" in stored.get_dtype() or "float8" in str(wanted):  # which torch does not promote
        raise CheckpointError(
            f"{name} is {stored.get_dtype()} in the files and {wanted} in the model: values have scales in 8 bits",
            f"convert the files to {wanted} first",
        )
    if dtype is None or not _widens(dtype, wanted):
        raise CheckpointError(
            f"{name} is {stored.get_dtype()} in the files and {wanted} in the model: values would be lost",
            f"build the model with {dtype} parameters (and choose the compute dtype by zerograph.backend(dtype=...)), "
            "or convert the files",
        )


def _widens(stored: torch.dtype, wanted: torch.dtype) -> bool:
    return torch.promote_types(stored, wanted) == wanted and stored.is_floating_point == wanted.is_floating_point


def _read_all(slots: Sequence[UnmadeTensor], found: dict[int, tuple[Any, str]], room: Room) -> None:
    for slot in slots:
        _read(slot, *found[id(slot)], room)


def _read(slot: UnmadeTensor, file: Any, name: str, room: Room) -> None:
    local = room.empty(local_of(slot.tensor), leaves=slot.leaves, on_host=slot.on_host)
    if slot.tensor.ndim == 0:
        # safetensors cuts slices of at least one dimension.
        local.copy_(file.get_tensor(name))
    elif local.numel():
        local.copy_(file.get_slice(name)[own_slices(slot.tensor)])
    room.filled(local)
    slot.local = local
