"""Where the shards of a model that is materialized are made: on its device, or at once on NVMe."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zerograph.runtime.shards import ShardStore


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for shards.

    Attributes:
        device: of the model.
        store: makes those that leave the device; None where none does.
    """

    device: torch.device
    store: ShardStore | None = None

    def empty(self, like: Tensor, *, leaves: bool) -> Tensor:
        """Memory for a tensor as ``like``; ``leaves`` says whether it is a shard, and no buffer or scalar."""
        if self.store is not None and leaves and like.numel():
            return self.store.early(like)
        return torch.empty_like(like, device=self.device)

    def filled(self, tensor: Tensor) -> None:
        """``tensor`` has its values, which nobody reads soon."""
        if self.store is not None:
            self.store.let_go(tensor)
