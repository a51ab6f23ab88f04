"""The states that a native optimizer keeps: made where they are missing, and in the form that kernels take."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zerograph.core.errors import CheckpointError, UnsupportedError
from zerograph.optim.algorithm import Algorithm, Group
from zerograph.optim.parts import GroupParts, Member, UpdateRow, parts_of
from zerograph.optim.tensors import GroupLayout, uses_kernels
from zerograph.runtime.offload.blocks import StatePlace
from zerograph.runtime.offload.shards import ShardStore
from zerograph.runtime.torch_private import local_tensor, placed_as


class States:
    """The states of one optimizer, which it does not keep alive, and the parts by which they are updated.

    Attributes:
        known: the parts of each key of rows, as they were last asked for.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        algorithm_of: Callable[[Group], Algorithm],
        master: torch.dtype | None,
        moments: torch.dtype | None,
        changed: Callable[[], None],
    ) -> None:
        """``algorithm_of`` finds that of a group; ``master`` and ``moments`` are the dtypes of
        :class:`~zerograph.optim.options.Options`; ``changed`` hears when parts are gone."""
        self._owner, self._algorithm_of = weakref.ref(optimizer), algorithm_of
        self._master, self._moments, self._changed = master, moments, changed
        self.known: dict[tuple[int, ...], GroupParts] = {}

    @property
    def _optimizer(self) -> Optimizer:
        found = self._owner()
        assert found is not None  # it asks
        return found

    def parts(self, rows: Sequence[UpdateRow], store: ShardStore | None) -> list[GroupParts]:
        """The parts of ``rows``, with states where some were missing; ``store`` has the placement of parameters."""
        # By identity: whoever replaced a parameter's dict has replaced tensors whose addresses kernels hold.
        states = set(map(id, self._optimizer.state.values()))
        return [self._parts(row, states, store) for row in rows]

    def _parts(self, row: UpdateRow, states: set[int], store: ShardStore | None) -> GroupParts:
        key, group, layout, grads = row
        state, algorithm = self._optimizer.state, self._algorithm_of(group)
        slots = algorithm.slots(group)
        plan = self.known.get(key)
        located = (store, store.locations.changes if store is not None else 0)
        if plan is None or not plan.holds(layout, slots, grads, states, located):
            known = plan.members_of(layout, state) if plan is not None else ()
            places = store.locations.places() if store is not None else {}
            parts = parts_of(layout, grads, known, lambda i: self._member(algorithm, layout, i, slots, store, places))
            plan = self.known[key] = GroupParts(layout, slots, parts, state, located)
            self._changed()
        return plan

    def _member(
        self,
        algorithm: Algorithm,
        layout: GroupLayout,
        index: int,
        slots: Sequence[str],
        store: ShardStore | None,
        places: Mapping[int, StatePlace],
    ) -> Member:
        """The parameter's state, made where it is missing and brought back, in the form that the kernels take."""
        param, local, name = layout.params[index], layout.locals[index], layout.name(index)
        place, (copy, streamed, through) = places.get(id(param)), _copies_of(param, store)
        if not local.numel() or not (slots or streamed or self._has_master(param)):
            place = None  # nothing to stream
        # An empty dict in `state` would count as a state: SGD without momentum has none, in torch, too.
        if not (algorithm.counts or slots or self._has_master(param)):
            return Member(index, local, local, [], None, False, place, copy, streamed, through)
        state = self._optimizer.state[param]
        if algorithm.counts:
            at = local.device if algorithm.counts_on_device else torch.device("cpu")
            state["step"] = _counter(state.get("step", 0.0), at)
        fresh = algorithm.starts_from_gradient and any(state.get(slot) is None for slot in slots)
        dtype, fill = self.dtype(param, algorithm), float(self._optimizer.defaults.get(algorithm.fill, 0.0))

        def kept(slot: str, value: Tensor | None, dtype: torch.dtype, fill: float) -> Tensor:
            if place is not None and store is not None:
                return on_nvme(store, self._optimizer, place, slot, value, param, name, dtype, fill)
            value = torch.full_like(param, fill, dtype=dtype) if value is None else value
            return _fitted(value, param, dtype, f"{slot} of {name}")

        for slot in slots:
            state[slot] = kept(slot, state.get(slot), dtype, fill)
        target = local
        if self._has_master(param):
            master = param.detach().to(torch.float32) if state.get("master") is None else state["master"]
            state["master"] = kept("master", master, torch.float32, 0.0)
            target = local_tensor(state["master"])
        states = [local_tensor(state[s]) for s in slots]
        return Member(index, local, target, states, state.get("step"), fresh, place, copy, streamed, through)

    def _has_master(self, param: Tensor) -> bool:
        return self._master is not None and param.dtype.itemsize < self._master.itemsize

    def dtype(self, param: Tensor, algorithm: Algorithm) -> torch.dtype:
        """float32 on the host, whatever the parameter's dtype is; on devices that of the parameter, as torch has it."""
        local, moments = local_tensor(param), self._moments
        if uses_kernels(local):
            return moments or torch.float32
        own = torch.float32 if self._has_master(param) else param.dtype
        if moments in (None, own):
            return own
        if algorithm.kernel_for(local, own) is None:
            raise UnsupportedError(
                f"moments={moments} for {own} on {param.device}: torch's fused kernels keep both alike",
                "leave moments out there; on the host, and on GPUs with Triton, each choice works",
            )
        return moments


def on_nvme(
    store: ShardStore, owner: Optimizer, place: StatePlace, slot: str, value: Tensor | None, param: Tensor, name: str,
    dtype: torch.dtype, fill: float = 0.0,
) -> Tensor:  # fmt: skip
    """State ``value`` that ``owner`` keeps of ``param`` on NVMe, where it is made, of ``fill``, when there is none;
    errors say ``name``, which is the parameter's."""
    if value is not None and value.dtype == dtype and store.states.holds(owner, place, slot, local_tensor(value)):
        return value
    stored = store.states.of(owner, place, slot, dtype, local_tensor(param), fill)
    if value is not None:
        stored.copy_(local_tensor(_fitted(value, param, dtype, f"{slot} of {name}")))
    return placed_as(stored, param)


def _copies_of(
    param: Tensor, store: ShardStore | None
) -> tuple[Tensor | None, tuple[tuple[str, torch.dtype], ...], str]:
    """The copy gathered in place of ``param``, its tensors on NVMe, and its name if it is updated elsewhere."""
    if store is None:
        return None, (), ""
    return store.copies.copy_of(param), store.copies.streamed(param), store.copies.through_device(param)


def _counter(value: Any, device: torch.device) -> Tensor:
    """``value`` as the 0-d float32 tensor that torch keeps."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, Tensor):
        return torch.full((), float(value), dtype=torch.float32, device=device)
    value = value.to(device, torch.float32)
    return value if value.ndim == 0 else value.reshape(())


def _fitted(value: Tensor, param: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """State ``value`` in ``dtype`` and laid out as ``param``; itself if it is so already."""
    if isinstance(param, DTensor) and not isinstance(value, DTensor) and value.shape == param.shape:
        from zerograph.sharding.shards import as_shard  # imports Dynamo, which plain tensors do not need

        value = as_shard(value, param)
    if value.shape != param.shape:
        raise CheckpointError(
            f"{name} has shape {tuple(value.shape)}, its parameter {tuple(param.shape)}",
            "load a checkpoint of the same model",
        )
    local, own = local_tensor(value), local_tensor(param)
    alike = local.stride() == own.stride() or (local.is_contiguous() and own.is_contiguous())
    if alike and (local.dtype, local.device, local.shape) == (dtype, own.device, own.shape):
        return value
    return torch.empty_like(param, dtype=dtype).copy_(value)


def restore_precision(optimizer: Optimizer, loaded: Mapping[str, Any]) -> None:
    """Put back what the state dict ``loaded`` has of parameters in 16 bits, whose dtype torch has rounded it to."""
    # A state dict numbers parameters in the order of its groups.
    ids = chain.from_iterable(g["params"] for g in loaded["param_groups"])
    params = chain.from_iterable(g["params"] for g in optimizer.param_groups)
    for key, param in zip(ids, params, strict=True):
        if key not in loaded["state"] or param.dtype.itemsize >= torch.float32.itemsize:
            continue
        for name, value in loaded["state"][key].items():
            if name != "step" and isinstance(value, Tensor):
                optimizer.state[param][name] = value.to(param.device)
