"""Where the shards of a model that is materialized are made: on its device, or at once where they will live."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from zerograph.runtime.offload.host import HostMemory
from zerograph.runtime.offload.hosted import host_like
from zerograph.runtime.offload.shards import ShardStore


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for shards.

    Attributes:
        device: of the model.
        store: makes those that go to NVMe; None where none does.
        host: of the device, for those whose outward parameters are there; None where none are.
    """

    device: torch.device
    store: ShardStore | None = None
    host: HostMemory | None = None

    def empty(self, like: Tensor, *, leaves: bool, on_host: bool) -> Tensor:
        """Memory for a tensor as ``like``; ``leaves`` says whether it is a shard, and no buffer or scalar, ``on_host``
        whether it belongs off an accelerator."""
        stays = self.host is not None and not on_host
        if self.store is not None and leaves and like.numel() and not stays:
            return self.store.early.make(like)
        if self.host is not None and on_host:
            return host_like(like, self.host)
        return torch.empty_like(like, device=self.device)

    def filled(self, tensor: Tensor) -> None:
        """``tensor`` has its values, which nobody reads soon."""
        if self.store is not None:
            self.store.early.drop_pages(tensor)

    @contextmanager
    def filling(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Meanwhile somebody writes ``tensors``, which this gave, from begin to end: of large ones what was written is
        let go of again and again, as one alone may be larger than memory."""
        large = [tensor for tensor in tensors if self.store is not None and tensor.nbytes > _LARGE]
        if not large:
            yield
            return
        done = threading.Event()

        def let_go() -> None:
            while not done.wait(_SECONDS):
                for tensor in large:
                    self.filled(tensor)

        with ThreadPoolExecutor(1, thread_name_prefix="zerograph-filling") as thread:
            letting_go = thread.submit(let_go)
            try:
                yield
            finally:
                done.set()
            letting_go.result()


_LARGE = 2**28
"""Bytes of a tensor that may be in memory as a whole."""

_SECONDS = 0.02
"""Between two times at which pages are let go of: some 30 MB are written meanwhile."""
