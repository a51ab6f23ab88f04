"""The repeated layers of a model, found so that a few of them can be traced in place of all.

Layers are alike when nothing that can be compared tells them apart: classes, parameters and buffers by name, shape,
stride and dtype, and every other attribute, but for a number that says which layer it is. What cannot be compared makes
them different. Whether they also *compute* alike is for the traced graphs to say (:mod:`zerograph.unfold`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    """

    path: str
    container: nn.Module
    layers: tuple[nn.Module, ...]

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
        try:
            yield
        finally:
            held.clear()
            held.update(before)


def repeated_layers(model: nn.Module) -> Stack | None:
    """The longest stack of at least :data:`LEAST` layers that are alike and share no parameter with anything else."""
    owners = Counter(id(p) for m in dict.fromkeys(model.modules()) for p in m._parameters.values() if p is not None)
    found: Stack | None = None
    for path, module in model.named_modules():
        layers = tuple(m for m in module._modules.values() if m is not None)
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(layers) < max(LEAST, _length(found) + 1):
            continue
        if path and len(set(map(id, layers))) == len(layers) and _all_alike(layers) and _own(layers, owners):
            found = Stack(path, module, layers)
    return found


def _length(stack: Stack | None) -> int:
    return len(stack.layers) if stack is not None else 0


def _own(layers: Sequence[nn.Module], owners: Counter[int]) -> bool:
    """Whether every parameter has one owner."""
    return all(owners[id(p)] == 1 for layer in layers for p in layer.parameters())


def _all_alike(layers: Sequence[nn.Module]) -> bool:
    return all(_alike(layers[0], layer, 0, number) for number, layer in enumerate(layers[1:], 1))


def _alike(a: nn.Module, b: nn.Module, first: int, second: int) -> bool:
    """Whether ``a``, in layer number ``first``, is like ``b`` in layer number ``second``."""
    if type(a) is not type(b) or list(a._modules) != list(b._modules) or a.__dict__.keys() != b.__dict__.keys():
        return False
    for tensors, others in ((a._parameters, b._parameters), (a._buffers, b._buffers)):
        if list(tensors) != list(others) or not all(map(_same_tensor, tensors.values(), others.values())):
            return False
    for name in a.__dict__.keys() - _MODULE_STATE:
        if not _same(a.__dict__[name], b.__dict__[name], first, second):
            return False
    return all(
        x is y if x is None or y is None else _alike(x, y, first, second)
        for x, y in zip(a._modules.values(), b._modules.values(), strict=True)
    )


def _same(a: Any, b: Any, first: int, second: int) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is int:
        return a == b or (a, b) == (first, second)
    if isinstance(a, torch.Tensor):
        return False  # a constant that is no buffer: its values may differ
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y, first, second) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key], first, second) for key in a)
    return (a == b) is True  # arrays compare element by element


def _same_tensor(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    facts = [(type(t), t.shape, t.stride(), t.dtype, t.requires_grad) for t in (a, b)]
    return facts[0] == facts[1]
