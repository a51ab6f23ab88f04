"""The sizes of a model read from the names and shapes of its parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod

from zerograph.core.step import layer_of
from zerograph.planner.estimate.sizes import ModelSize

Shapes = Mapping[str, tuple[int, ...]]

_SMALL = 10
"""Numbered modules are layers where they hold a tenth of what the largest group of them does: a trunk, two trunks of an
encoder and a decoder, but no head of two matrices."""


def size_of_shapes(shapes: Shapes, *, heads: int | None = None, **given: int | None) -> ModelSize:
    """The size of the model whose parameters have these shapes, each tied one named once.

    - parameters: all of them, exactly.
    - layers: numbered modules (``blocks.3``) that consist of others, those inside of others not counted again.
    - hidden: the extent that the layers' matrices have most often; it is one side of nearly each of them.
    - vocab: rows of the tallest matrix outside of the layers.

    Args:
        shapes: by fully qualified name, in the order of the model.
        heads: attention heads, which shapes do not tell; 128 wide unless given.
        given: ``layers``, ``hidden`` or ``vocab``, in place of what is read.
    """
    layers = _layers(shapes)
    inside = [shape for name, shape in shapes.items() if layer_of(_module(name)) in layers]
    outside = [shape for name, shape in shapes.items() if layer_of(_module(name)) not in layers]
    rows = [rows for rows, _ in _matrices(outside)] or [rows for rows, _ in list(_matrices(inside))[-1:]]
    return ModelSize.of(
        max(1, sum(map(prod, shapes.values()))),
        layers=given.get("layers") or max(1, len(layers)),
        hidden=given.get("hidden") or _commonest_extent(inside or outside),
        vocab=given.get("vocab") or max(rows, default=1),
        heads=heads,
    )


def _layers(shapes: Shapes) -> set[str]:
    """Layers of modules (blocks of a transformer); where there are none, layers that are modules of one operation."""
    # A module of one operation has its parameters itself: an entry of nn.Sequential, no block.
    composed = {n: s for n, s in shapes.items() if _module(n) != layer_of(_module(n))}
    return _large(composed) or _large(shapes)


def _large(shapes: Shapes) -> set[str]:
    elements: Counter[str] = Counter()
    found: dict[str, str] = {}
    for name, shape in shapes.items():
        if layer := layer_of(_module(name)):
            found[layer] = layer.rpartition(".")[0]
            elements[found[layer]] += prod(shape)
    least = max(elements.values(), default=0) / _SMALL
    return {layer for layer, container in found.items() if elements[container] >= least}


def _commonest_extent(shapes: list[tuple[int, ...]]) -> int:
    counts = Counter(extent for matrix in _matrices(shapes) for extent in matrix)
    return max(counts, key=lambda extent: (counts[extent], -extent), default=1)


def _matrices(shapes: list[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """Rows and columns; of experts that are stacked in one parameter, those of one."""
    return ((shape[-2], shape[-1]) for shape in shapes if len(shape) in (2, 3) and min(shape) > 1)


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]
