"""Models built on the meta device, given memory and values shard by shard: :func:`zerograph.materialize`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerograph.core.arguments import paths, require
from zerograph.core.errors import ShardingError
from zerograph.runtime.offload.shards import ShardStore
from zerograph.runtime.torch_private import placed_as
from zerograph.sharding.adopt import replace_everywhere
from zerograph.sharding.adoption import Adoption
from zerograph.sharding.files.export import plain_name
from zerograph.sharding.files.room import Room
from zerograph.sharding.files.shard_files import UnmadeTensor, read_files
from zerograph.sharding.gathered import group_of, shown
from zerograph.sharding.shards import agree, local_of, send_from_first
from zerograph.sharding.unsharded import FORWARDS

log = logging.getLogger(__name__)

Init = Callable[[nn.Module], Any] | Literal["reset_parameters"] | None
Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None


def files_to_read(init: object, files: object) -> tuple[str, ...]:
    """The ``files`` that :func:`zerograph.materialize` was given, none if it was not.

    Raises:
        ConfigError: ``files`` are no paths, or no file, or ``init`` is no function: a path, perhaps.
    """
    named = init is None or (isinstance(init, str) and init == "reset_parameters")
    require(
        named or (callable(init) and not isinstance(init, nn.Module)),
        f'init must be None, "reset_parameters" or a function of a module, got {init!r:.80}',
        f"weights are read from files=: zerograph.materialize(model, files={init!r:.80})"
        if isinstance(init, str | os.PathLike | list | tuple)
        else "init=model._init_weights initializes a model of transformers",
    )
    if files is None:
        return ()
    found = paths("files", files, "a safetensors file", 'files=sorted(Path(folder).glob("*.safetensors"))')
    require(bool(found), "files is empty: nothing would be read", "see whether the folder has *.safetensors files")
    return found


def fill(
    model: nn.Module,
    adoption: Adoption | None,
    init: Init,
    files: Sequence[str],
    store: ShardStore | None = None,
) -> nn.Module:
    """Carry out :func:`zerograph.materialize` for a model that ``adoption`` has sharded; in ``store``, if it is given,
    as parameters then leave the device."""
    slots = _empty_slots(model)
    if not slots:
        require(
            not files,
            "nothing of the model is on the meta device, and what has values keeps them: files= would not be read",
            "build it under torch.device('meta'), or load it: model.load_state_dict(safetensors.torch.load_file(path))",
        )
        return model
    if adoption is None or adoption.ranks is None:
        raise ShardingError(
            "the model on the meta device belongs to no backend yet",
            "call zerograph.shard(model, backend) first, with this very model",
        )
    room, group = Room(adoption.ranks.device, store, adoption.ranks.host), group_of(model)
    if files:
        read_files(slots, files, room, group, strict=init is None)
    _initialize(model, slots, init if callable(init) else None, room, group, _how_to_initialize(model, files))
    new = _install(slots)
    if adoption.params:  # a lone rank shards nothing, and knows of no parameter when it is gone
        adoption.replace(new)
    return model


def _empty_slots(model: nn.Module) -> list[UnmadeTensor]:
    slots: dict[int, UnmadeTensor] = {}
    # Duplicates too: a file may know a tied parameter by any of its names.
    for prefix, module in model.named_modules(remove_duplicate=False):
        for tensors in (module._parameters, module._buffers):
            for attribute, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                persistent = attribute not in module._non_persistent_buffers_set
                slot = slots.setdefault(id(tensor), UnmadeTensor(tensor, persistent))
                slot.names.append(plain_name(f"{prefix}.{attribute}".lstrip(".")))
                spec = module.__dict__.get("_zg_specs", {}).get(attribute)
                slot.leaves |= spec is not None and spec.sharded
                slot.on_host |= spec is not None and spec.device is not None
                if (module, attribute) not in slot.at:
                    slot.at.append((module, attribute))
    return list(slots.values())


def _how_to_initialize(model: nn.Module, files: Sequence[str]) -> str:
    """The hint where something is left without values."""
    if callable(getattr(model, "_init_weights", None)):  # of transformers
        call = "zerograph.materialize(model, init=model._init_weights"
        return f"no file holds it: {call}, files=...)" if files else f"{call})"
    return "fill every own parameter and buffer, also non-persistent ones, in reset_parameters() or in init="


def _initialize(
    model: nn.Module,
    slots: Sequence[UnmadeTensor],
    init: Callable[[nn.Module], Any] | None,
    room: Room,
    group: dist.ProcessGroup | None,
    hint: str,
) -> None:
    """Fill the slots that are still empty, unit by unit, with rank 0's values; ``hint`` says how, where that fails."""
    by_place = {(module, attribute): slot for slot in slots for module, attribute in slot.at}
    names = {module: name for name, module in model.named_modules()}
    # All shards before the first full tensor: otherwise they come to lie between the holes that those leave.
    empty = [slot for slot in slots if slot.local is None]
    shards = {id(slot): room.empty(local_of(slot.tensor), leaves=slot.leaves, on_host=slot.on_host) for slot in empty}
    for unit in _units(model):
        places = {(m, a): by_place[m, a] for m in unit for a in (*m._parameters, *m._buffers) if (m, a) in by_place}
        if all(slot.local is not None for slot in places.values()):
            continue
        full: dict[int, Tensor] = {}
        label = f"module {names[unit[-1]] or 'at the root'} ({type(unit[-1]).__name__})"
        # Where one rank has all of a tensor off the device, that is what is initialized.
        alone = room.store is not None and (group is None or group.size() == 1)
        there = {id(s): shards[id(s)] for s in places.values() if alone and s.leaves and s.local is None}
        with room.filling(there.values()):
            agree(
                group,
                lambda: full.update(_fill(unit, places, init, room.device, label, there, hint)),  # noqa: B023
                ShardingError,
                first=True,
            )
        for slot in {id(s): s for s in places.values() if s.local is None}.values():
            slot.local = shards.pop(id(slot))
            send_from_first(full.pop(id(slot), None), slot.local, group, slot.tensor)
            room.filled(slot.local)


def _units(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Modules that are initialized together, children before parents, in the order in which they are constructed."""
    if _resets_children(module):
        yield list(_post_order(module))
        return
    for child in module.children():
        yield from _units(child)
    yield [module]


def _resets_children(module: nn.Module) -> bool:
    # Its _reset_parameters() changes the bias of its output projection.
    return isinstance(module, nn.MultiheadAttention)


def _post_order(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _post_order(child)
    yield module


def _fill(
    unit: Sequence[nn.Module],
    places: dict[tuple[nn.Module, str], UnmadeTensor],
    init: Callable[[nn.Module], Any] | None,
    device: torch.device,
    label: str,
    there: Mapping[int, Tensor],
    hint: str,
) -> dict[int, Tensor]:
    """Run the initialization of ``unit`` on full tensors, of which some are ``there``; returns them by ``id`` of their
    slots."""
    for module in unit:
        _refuse_half_filled(module, label)
    if init is None and any(_own_reset(module) is None for module in unit):
        names = ", ".join(dict.fromkeys(slot.names[0] for slot in places.values() if slot.local is None))
        raise ShardingError(f"{label} has no reset_parameters() to fill {names}", hint)
    blank = {id(slot): _blank(slot.tensor, device, there.get(id(slot))) for slot in places.values()}
    before = {key: tensor._version for key, tensor in blank.items() if not tensor.is_inference()}
    with ExitStack() as stack:
        for module in unit:
            own = {a: blank[id(slot)] for (m, a), slot in places.items() if m is module}
            stack.enter_context(_shown_blank(module, own))
        for module in unit:
            _reset(module, init)
        # Reversed, so that of tied places the first one's value stays in the dict.
        values = {id(slot): _current(m, a) for (m, a), slot in reversed(places.items())}
    for slot in {id(s): s for s in places.values() if s.local is None}.values():
        untouched = _is_untouched(values[id(slot)], blank[id(slot)], before.get(id(slot)))
        _check_filled(values[id(slot)], slot, init, label, hint, untouched)
    return {key: _unaliased(value, there.get(key), there.values()) for key, value in values.items()}


def _unaliased(value: Any, own: Tensor | None, there: Iterable[Tensor]) -> Any:
    """``value``, or a copy where an initialization has put it in memory that is ``there`` for another tensor, or for
    this one in another layout."""
    if not isinstance(value, Tensor):
        return value
    stays = own is not None and value.data_ptr() == own.data_ptr() and value.stride() == own.stride()
    memories = {tensor.untyped_storage().data_ptr() for tensor in there}
    return value.clone() if not stays and value.untyped_storage().data_ptr() in memories else value


def _refuse_half_filled(module: nn.Module, label: str) -> None:
    shards = {
        a: p for a, p in module._parameters.items() if p is not None and a in module.__dict__.get("_zg_specs", ())
    }
    filled = [a for a, p in shards.items() if not local_of(p).is_meta]
    if filled:
        raise ShardingError(
            f"{label} has values for {filled[0]!r} already, and others without",
            "build each module either wholly on the meta device or not at all",
        )


def _blank(tensor: Tensor, device: torch.device, blank: Tensor | None) -> Tensor:
    """Memory for the full ``tensor``, ``blank`` if given; not-a-number shows what the initialization leaves out."""
    if blank is None:
        blank = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return blank.fill_(torch.nan) if blank.is_floating_point() else blank.zero_()


@contextmanager
def _shown_blank(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    buffers = {name: module._buffers[name] for name in tensors if name in module._buffers}
    params = {
        name: nn.Parameter(tensor, requires_grad=getattr(module._parameters[name], "requires_grad", True))
        for name, tensor in tensors.items()
        if name not in buffers
    }
    with shown(module, params):
        module._buffers.update({name: tensors[name] for name in buffers})
        try:
            yield
        finally:
            module._buffers.update(buffers)


def _own_reset(module: nn.Module) -> Callable[[], Any] | None:
    return getattr(module, "_reset_parameters" if _resets_children(module) else "reset_parameters", None)


def _reset(module: nn.Module, init: Callable[[nn.Module], Any] | None) -> None:
    own = _own_reset(module)
    with torch.no_grad(), FORWARDS:  # what is not the module's own is refused, as a meta parameter in a forward is
        if own is not None:
            own()
        if init is not None:
            init(module)


def _current(module: nn.Module, attribute: str) -> Any:
    value = module._buffers[attribute] if attribute in module._buffers else module._parameters.get(attribute)
    return value.detach() if isinstance(value, Tensor) else value


def _is_untouched(value: Any, blank: Tensor, version: int | None) -> bool:
    """Whether an initialization has left ``blank`` as it was at ``version``; no number of an integer says so."""
    same = isinstance(value, Tensor) and value.numel() > 0 and value.data_ptr() == blank.data_ptr()
    return same and version is not None and blank._version == version


def _check_filled(value: Any, slot: UnmadeTensor, init: Any, label: str, hint: str, untouched: bool) -> None:
    by = "the given init function" if init is not None else "reset_parameters()"
    if not isinstance(value, Tensor) or value.shape != slot.tensor.shape:
        raise ShardingError(f"{by} left {slot.names[0]} without a tensor of shape {list(slot.tensor.shape)}")
    # In parts: what tells of each element is a quarter of them.
    left = (
        any(part.isnan().any() for part in value.reshape(-1).split(_PART)) if value.is_floating_point() else untouched
    )
    if left:
        raise ShardingError(f"{by} did not fill all of {slot.names[0]} in {label}", hint)


_PART = 2**24
"""Elements that are looked at together."""


def _install(slots: Sequence[UnmadeTensor]) -> dict[int, nn.Parameter]:
    """Put the filled tensors where the empty ones were; returns the new parameters by ``id`` of the old."""
    new: dict[int, tuple[Tensor, nn.Parameter]] = {}
    for slot in slots:
        assert slot.local is not None
        if not isinstance(slot.tensor, nn.Parameter):
            for module, attribute in slot.at:
                module._buffers[attribute] = slot.local
            continue
        param = nn.Parameter(placed_as(slot.local, slot.tensor), requires_grad=slot.tensor.requires_grad)
        for module, attribute in slot.at:
            module._parameters[attribute] = param
        new[id(slot.tensor)] = (slot.tensor, param)
    # States that exist are laid out like the shards, whose layout stays.
    replace_everywhere(new, lambda value, _: value)
    log.info("materialized %d parameters", len(new))
    return {old: param for old, (_, param) in new.items()}
