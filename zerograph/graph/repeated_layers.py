"""The repeated layers of a model, found so that a few of them can be traced in place of all.

Layers are alike when nothing that can be compared tells them apart: classes, parameters and buffers by name, shape,
stride and dtype, and every other attribute. What cannot be compared makes them different. An attribute may count the
layers, as ``layer_idx`` does in transformers; it is hidden while a few of them are traced, so that a forward that goes
by it fails to trace instead of speaking for layers that nobody looked at. Whether they also *compute* alike is for the
traced graphs to say (:mod:`zerograph.compiler.unfold`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

LEAST = 8
"""Layers that a stack has, at least, for tracing two times four or five of them to pay."""

_MODULE_STATE = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True, slots=True)
class Stack:
    """A ``ModuleList`` or ``Sequential`` of layers that are alike.

    Attributes:
        path: its fully qualified name.
        container: the module that holds the layers and nothing else.
        layers: all of them, in order.
        numbers: attributes that count the layers: the module within a layer, and the name.
    """

    path: str
    container: nn.Module
    layers: tuple[nn.Module, ...]
    numbers: tuple[tuple[str, str], ...]

    def probes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Which layers to trace: the first two and the last two, and then one of the middle too."""
        last = len(self.layers) - 1
        return (0, 1, last - 1, last), (0, 1, last // 2, last - 1, last)

    @contextmanager
    def only(self, chosen: Sequence[int]) -> Iterator[None]:
        """Inside, the container holds the ``chosen`` layers, numbered from 0."""
        held = self.container._modules
        before = dict(held)
        held.clear()
        held.update((str(place), self.layers[index]) for place, index in enumerate(chosen))
        counting = [
            (layer.get_submodule(within), name)
            for layer in held.values()
            if layer is not None
            for within, name in self.numbers
        ]
        known = [module.__dict__[name] for module, name in counting]
        for module, name in counting:
            module.__dict__[name] = _HIDDEN
        try:
            yield
        finally:
            for (module, name), number in zip(counting, known, strict=True):
                module.__dict__[name] = number
            held.clear()
            held.update(before)


def _used(*_: Any) -> Any:
    raise RuntimeError("its layers compute with their number")


_USES = """eq ne lt le gt ge hash bool int index float str repr format add radd sub rsub mul rmul truediv rtruediv
floordiv rfloordiv mod rmod pow rpow and rand or ror neg abs"""
_HIDDEN = type("Hidden", (), {f"__{use}__": _used for use in _USES.split()})()
"""In place of a layer's number: may be handed on, and fails when it is used."""


def repeated_layers(model: nn.Module) -> Stack | None:
    """The longest stack of at least :data:`LEAST` layers that are alike and share no parameter with anything else."""
    owners = Counter(id(p) for m in dict.fromkeys(model.modules()) for p in m._parameters.values() if p is not None)
    found: Stack | None = None
    for path, module in model.named_modules():
        layers = tuple(m for m in module._modules.values() if m is not None)
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(layers) < max(LEAST, _length(found) + 1):
            continue
        # A layer that stands in a stack twice is one layer that runs twice.
        if path and len(set(map(id, layers))) == len(layers) and _own(layers, owners):
            numbers = _numbers(layers)
            if numbers is not None:
                found = Stack(path, module, layers, numbers)
    return found


def _length(stack: Stack | None) -> int:
    return len(stack.layers) if stack is not None else 0


def _own(layers: Sequence[nn.Module], owners: Counter[int]) -> bool:
    """Whether every parameter has one owner."""
    return all(owners[id(p)] == 1 for layer in layers for p in layer.parameters())


def _numbers(layers: Sequence[nn.Module]) -> tuple[tuple[str, str], ...] | None:
    """The attributes in which ``layers``, alike otherwise, count themselves; None if they are not alike."""
    counting: set[tuple[str, str]] = set()
    for number, layer in enumerate(layers[1:], 1):
        for (name, a), (other, b) in zip_longest(
            layers[0].named_modules(), layer.named_modules(), fillvalue=("", None)
        ):
            differing = _differing(a, b) if name == other else None
            if differing is None:
                return None
            counting |= {(name, attribute) for attribute in differing}
            if any((a.__dict__[key], b.__dict__[key]) != (0, number) for key in differing):  # type: ignore[union-attr]
                return None
    return tuple(sorted(counting))


def _differing(a: nn.Module | None, b: nn.Module | None) -> list[str] | None:
    """Attributes that are different numbers in two modules that are alike otherwise; None if those are not."""
    if a is None or b is None or type(a) is not type(b) or a.__dict__.keys() != b.__dict__.keys():
        return None
    for tensors, others in ((a._parameters, b._parameters), (a._buffers, b._buffers)):
        if list(tensors) != list(others) or not all(map(_same_tensor, tensors.values(), others.values())):
            return None
    different = [k for k in a.__dict__ if k not in _MODULE_STATE and not _same(a.__dict__[k], b.__dict__[k])]
    # By type: a flag that differs is no number of a layer, though True is an int.
    return different if all(type(a.__dict__[k]) is type(b.__dict__[k]) is int for k in different) else None


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, torch.Tensor):
        return False  # a tensor that is no buffer is a constant: its values may differ
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    return (a == b) is True  # arrays compare element by element


def _same_tensor(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    facts = [(type(t), t.shape, t.stride(), t.dtype, t.requires_grad) for t in (a, b)]
    return facts[0] == facts[1]
