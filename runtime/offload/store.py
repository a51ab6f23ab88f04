"""An extent of an arena as an ordinary tensor, for whoever does not know about arenas: a checkpoint, a stock optimizer.

The tensor is a shared mapping of the slab file, so nothing is read before it is used, and what is written to it reaches
the disk when the kernel thinks fit. Both views show the same bytes: the arena writes dirty pages of the mapping out
before it reads the extent past the page cache, and drops cached pages once it has written there. A transfer counts as
done when ``Arena.wait`` has returned; while it is under way, its range must not be touched through the mapping.

A mapping needs no name of the file and no open descriptor, so it outlives the arena.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zerograph.runtime.offload.extents import Extent
from zerograph.runtime.offload.nvme import Arena


def mapped_tensor(arena: Arena, extent: Extent, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> Tensor:
    """A tensor of ``shape`` over the bytes of ``extent`` from ``offset`` on; tensors of one extent share them.

    While one lives, ``extent`` cannot be freed.

    Raises:
        ValueError: the extent is too small, or not of this arena.
        StorageError: it cannot be mapped; with errno.
    """
    size = math.prod(shape) * dtype.itemsize
    if offset < 0 or offset + size > extent.bytes:
        where = f" from byte {offset} on" if offset else ""
        raise ValueError(f"{tuple(shape)} of {dtype} takes {size} bytes{where}, the extent has {extent.bytes}")
    if size == 0:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    # A storage of its own, that begins here: whoever saves the tensor would save the whole of a shared one.
    flat = torch.frombuffer(arena.map(extent), dtype=torch.uint8, count=size, offset=offset)
    return flat.view(dtype).view(tuple(shape))
