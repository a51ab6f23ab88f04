"""Optimizers of torch.optim over parameters whose states are on NVMe: they step through mappings of these.

They are slower than the native ones, as every byte passes the page cache, and compute the same.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from zerograph.core.errors import UnsupportedError
from zerograph.optim.algorithm import Algorithm
from zerograph.optim.algorithms.adagrad import ADAGRAD
from zerograph.optim.algorithms.adam import ADAM
from zerograph.optim.algorithms.sgd import MOMENTUM
from zerograph.optim.states import on_nvme
from zerograph.optim.tensors import names_in
from zerograph.runtime.offload.blocks import StatePlace
from zerograph.runtime.offload.shards import ShardStore

_KNOWN: dict[type[Optimizer], Algorithm] = {Adam: ADAM, AdamW: ADAM, Adagrad: ADAGRAD, SGD: MOMENTUM}


def make_states(optimizer: Optimizer, store: ShardStore) -> None:
    """Let the states of ``optimizer`` be on NVMe, made there before its first step.

    Raises:
        UnsupportedError: nothing is known of the states that it keeps.
        StorageError: there is no room for them.
    """
    places = store.locations.places()
    for group in optimizer.param_groups:
        names = names_in(group)
        for index, param in enumerate(group["params"]):
            # States may be there before a gradient is, as those that were loaded.
            if id(param) in places and (param.grad is not None or param in optimizer.state):
                name = f"parameter {names.get(id(param), f'{index} of its group')}"
                _make(optimizer, group, param, name, store, places[id(param)])


def _make(
    optimizer: Optimizer, group: dict[str, object], param: Tensor, name: str, store: ShardStore, place: StatePlace
) -> None:
    slots = _slots(optimizer, group)
    if not slots:
        return  # an empty dict in `state` would count as one
    state = optimizer.state[param]
    for slot in slots:
        value = state.get(slot)
        dtype = param.dtype if value is None else value.dtype
        state[slot] = on_nvme(store, optimizer, place, slot, value, param, name, dtype)
    if "step" not in state and not isinstance(optimizer, Adagrad):
        double = torch.get_default_dtype() == torch.float64 and not group["fused"]
        # As torch has it for parameters on the host, whatever the default device.
        state["step"] = torch.tensor(0.0, dtype=torch.float64 if double else torch.float32, device="cpu")


def _slots(optimizer: Optimizer, group: dict[str, object]) -> tuple[str, ...]:
    known = _KNOWN.get(type(optimizer))  # subclasses may keep more
    slots = known.slots(group) if known is not None else ()
    # A state that starts from a gradient is made with the first one.
    if known is None or (slots and known.starts_from_gradient):
        raise UnsupportedError(
            f"{type(optimizer).__name__} cannot keep its states on NVMe: ZeroGraph does not know which it makes",
            "use zerograph.optim, or AdamW, Adam or Adagrad of torch.optim, or train without offload",
        )
    return slots
