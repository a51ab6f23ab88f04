"""Tensors on disk: an arena of extents, read and written in the background past the page cache.

    arena = Arena(["/mnt/a", "/mnt/b"], 64 * 2**30)
    extent = arena.allocate(tensor.nbytes)
    ticket = arena.write(extent, tensor)
    ...
    arena.wait(ticket)

One file per folder, private and without a name where that is possible; with several folders, consecutive stripes lie
in turn on each. ``ZEROGRAPH_IO`` is ``uring`` or ``threads`` to force one of the two engines of csrc/io.h.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from errno import ENOMEM
from pathlib import Path

import torch
from torch import Tensor

import zerograph._core as _core
from zerograph._core import Direction, Priority
from zerograph.core.errors import StorageError
from zerograph.core.timeline import Stream
from zerograph.core.units import format_bytes
from zerograph.runtime.offload.extents import ALIGNMENT, Extent, FreeList
from zerograph.runtime.timings import Purpose, Timings

__all__ = ["ALIGNMENT", "STRIPE", "Arena", "Extent", "Priority", "Ticket", "huge_tensor"]

log = logging.getLogger(__name__)

STRIPE = 8 * 2**20
"""Bytes on one folder before the next one follows: a transfer long enough for the full speed of a disk."""
_MOST_STRIPES = 2**14
"""In an arena. Each that a tensor maps is a mapping of the system's, of which a process has 65530."""
_TOO_MANY = "sysctl -w vm.max_map_count=1048576: each stripe of a mapped tensor needs one; or fewer folders in path="


@dataclass(eq=False, slots=True)
class Ticket:
    """A transfer under way. The tensor is kept alive, and must not be changed (nor read, while it is read into), until
    :meth:`Arena.wait` has returned or :meth:`Arena.done` has said so."""

    id: int | None
    direction: Direction
    tensor: Tensor | None
    offset: int
    bytes: int
    purpose: Purpose | None = None
    error: Exception | None = None
    finished: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class Arena:
    """Room for ``size`` bytes of tensors in ``paths``, reserved at once.

    ``stripe`` bytes lie on one path before the next follows, ``STRIPE`` or, in large arenas, more of them. ``depth``
    transfers are in flight at most, each at most ``block`` bytes long. Memory that is not aligned goes through
    ``buffers`` staging buffers of ``buffer`` bytes. ``direct=False`` goes through the page cache. ``timings``
    hears of transfers that were waited for. A context manager: leaving it closes it.

    Raises:
        StorageError: a folder cannot be written, has no room, is a symbolic link, or is reached through one that
            neither root nor this user owns; with errno.
        ValueError: an argument, or ``ZEROGRAPH_IO``, is none.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        size: int,
        *,
        stripe: int | None = None,
        depth: int = 32,
        block: int = STRIPE,
        buffer: int = 4 * 2**20,
        buffers: int = 8,
        engine: str | None = None,
        direct: bool = True,
        timings: Timings | None = None,
    ) -> None:
        if isinstance(paths, (str, Path)) or not paths:
            raise ValueError(f"paths must be a list of folders, got {paths!r}")
        if stripe is None:
            stripe = _stripe_of(size)
        if stripe <= 0 or stripe % ALIGNMENT:
            raise ValueError(f"stripe must be a multiple of {ALIGNMENT} bytes, got {stripe}")
        if size < 0:
            raise ValueError(f"size cannot be negative, got {size}")
        # Whole stripes on every folder: all slabs have the same size.
        unit = ALIGNMENT if len(paths) == 1 else stripe * len(paths)
        self.stripe, self.size = stripe, -(-size // unit) * unit
        self._timings = timings or Timings()
        with _explained():
            name = engine or os.environ.get("ZEROGRAPH_IO") or "auto"
            self._engine = _core.IoEngine(name, depth=depth, block=block, buffer=buffer, buffers=buffers)
            try:
                self._slabs = [_core.Slab(os.fspath(p), self.size // len(paths), direct) for p in paths]
            except OSError:
                self._engine.close()
                raise
        self._files = [self._engine.attach(s.fd, s.path, s.memory_alignment, s.offset_alignment) for s in self._slabs]
        self._tell(direct)
        self._free = FreeList(self.size)
        # Tickets hold the tensors that the engine reads and writes.
        self._live: dict[int, Ticket] = {}
        self._begun: list[Ticket] = []  # whose numbers are not known
        self._registered: dict[int, Tensor] = {}
        # A mapping lives as long as a tensor that shows it.
        self._mappings: weakref.WeakValueDictionary[Extent, _core.FileMapping] = weakref.WeakValueDictionary()
        self._mappings_lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _shut, os.getpid(), self._engine, self._slabs, self._live, self._begun)

    def _tell(self, direct: bool) -> None:
        for note in self._engine.notes.splitlines():
            _say_once(note, warn=self._engine.name == "threads")
        for slab in self._slabs:
            for note in slab.notes.splitlines():
                _say_once(note, warn=True)
            if direct and not slab.direct:
                what = "has no direct I/O: offloaded tensors go through the page cache, which costs a copy and memory"
                _say_once(f"{slab.path} {what}", warn=True)

    # ---- room

    @property
    def engine(self) -> str:
        """ "uring" or "threads"."""
        return self._engine.name

    @property
    def direct(self) -> bool:
        """Whether transfers go past the page cache on every path."""
        return all(s.direct for s in self._slabs)

    @property
    def stats(self) -> dict[str, int]:
        """transfers, retries, bytes_read, bytes_written, and bytes_staged: those of them that were copied once more."""
        return self._engine.stats

    @property
    def free_bytes(self) -> int:
        """Bytes that no extent holds."""
        return self._free.free

    def allocate(self, size: int) -> Extent:
        """An extent for ``size`` bytes, at a multiple of ``ALIGNMENT``.

        Raises:
            StorageError: nothing so large is free.
        """
        if size < 0:
            raise ValueError(f"size cannot be negative, got {size}")
        extent = self._free.take(size)
        if extent is None:
            message = (
                f"no room for {format_bytes(size)} in an arena of {format_bytes(self.size)}: "
                f"{format_bytes(self._free.free)} are free, at most {format_bytes(self._free.largest)} in one piece"
            )
            raise StorageError(message, "make the arena larger, or free extents first")
        return extent

    def free(self, extent: Extent) -> None:
        """Give ``extent`` back. Transfers under way still end, before any later one touches the same place.

        Raises:
            ValueError: it is not of this arena, or a tensor still maps it.
        """
        # The tensor would go on showing a place that somebody else's data is written to.
        if extent in self._mappings:
            raise ValueError(f"{extent} is mapped by a tensor\n\nhint: let go of the tensor first")
        self._free.give(extent)

    def is_mapped(self, extent: Extent) -> bool:
        """Whether a tensor maps ``extent``, so that it cannot be freed."""
        return extent in self._mappings

    def maps(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` shows an extent of this arena."""
        address = tensor.data_ptr()
        return any(m.address <= address < m.address + extent.bytes for extent, m in self._mapped())

    # ---- transfers

    def write(
        self,
        extent: Extent,
        tensor: Tensor,
        priority: Priority = Priority.later,
        *,
        offset: int = 0,
        purpose: Purpose | None = None,
    ) -> Ticket:
        """Begin to write ``tensor``, contiguous and in host memory, to ``extent`` from byte ``offset`` on.

        Memory at a multiple of the disk's alignment (``huge_tensor`` has it) is used directly; other memory is copied
        through staging buffers, as are sizes and offsets that are no whole blocks.
        """
        return self._submit(Direction.write, extent, tensor, priority, offset, purpose)

    def read(
        self,
        extent: Extent,
        tensor: Tensor,
        priority: Priority = Priority.now,
        *,
        offset: int = 0,
        purpose: Purpose | None = None,
    ) -> Ticket:
        """Begin to fill ``tensor``, contiguous and in host memory, from ``extent`` from byte ``offset`` on."""
        return self._submit(Direction.read, extent, tensor, priority, offset, purpose)

    def _submit(
        self,
        direction: Direction,
        extent: Extent,
        tensor: Tensor,
        priority: Priority,
        offset: int,
        purpose: Purpose | None,
    ) -> Ticket:
        size = self._check(extent, tensor, offset)
        self._reap()
        ticket = Ticket(None, direction, tensor, extent.offset + offset, size, purpose)
        if size == 0:
            ticket.finished, ticket.tensor = True, None
            return ticket
        # Behind the extent's end its last page is empty: there a short last block may be written as a whole one.
        padded = offset + size == extent.bytes
        address, segments = tensor.data_ptr(), []
        for slab, place, begin, length in self._parts(ticket.offset, size):
            last = begin + length == size
            segments.append((self._files[slab], place, address + begin, length, padded and last))
        if direction is Direction.read and not tensor.is_inference():
            # The disk writes where autograd does not see it.
            torch.autograd.graph.increment_version(tensor)
        with _explained():
            self._prepare(ticket, self._mappings.get(extent), offset)
            # A handler of signals may raise when the engine has begun, and before anything else here: what it reads or
            # writes stays until the arena closes.
            self._begun.append(ticket)
            ticket.id = self._engine.submit(direction, segments, priority)
        self._live[ticket.id] = ticket
        self._begun.remove(ticket)
        return ticket

    def _check(self, extent: Extent, tensor: Tensor, offset: int) -> int:
        """Bytes of ``tensor``."""
        if not isinstance(tensor, Tensor):
            raise TypeError(f"a tensor is needed, got {type(tensor).__name__}")
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise ValueError(f"transfers need a dense tensor in host memory, got {tensor.layout} on {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"transfers need a contiguous tensor, got strides {tensor.stride()}\n\nhint: contiguous()")
        size = tensor.numel() * tensor.element_size()
        self._check_extent(extent)
        if offset < 0 or offset + size > extent.bytes:
            raise ValueError(f"{size} bytes at offset {offset} do not fit into {extent}")
        address = tensor.data_ptr()
        for other, mapping in self._mapped():
            if mapping.address < address + size and address < mapping.address + other.bytes:
                raise ValueError("a tensor that maps an extent cannot be transferred itself\n\nhint: clone() it")
        return size

    def _check_extent(self, extent: Extent) -> None:
        if not self._finalizer.alive:
            raise ValueError("the arena is closed")
        if extent not in self._free:
            raise ValueError(f"{extent} is not of this arena, or was freed")

    def _parts(self, offset: int, size: int) -> Iterator[tuple[int, int, int, int]]:
        """(path, offset there, offset in the range, bytes) of each stripe of a range of the arena."""
        count, begin = len(self._slabs), 0
        if count == 1:
            yield 0, offset, 0, size
            return
        while begin < size:
            stripe, inside = divmod(offset + begin, self.stripe)
            length = min(self.stripe - inside, size - begin)
            yield stripe % count, stripe // count * self.stripe + inside, begin, length
            begin += length

    def wait(self, ticket: Ticket) -> None:
        """Return once that one transfer is done.

        Raises:
            StorageError: it failed; with errno and file. The arena stays usable.
        """
        with ticket.lock:
            self._collect(ticket)
        if ticket.error is not None:
            raise ticket.error

    def done(self, ticket: Ticket) -> bool:
        """Whether ``ticket`` is done, well or not; never waits."""
        return ticket.finished or ticket.id is None or self._engine.done(ticket.id)

    def _collect(self, ticket: Ticket) -> None:
        """Fetch the outcome of ``ticket``, whose lock is held."""
        if ticket.finished or ticket.id is None:
            return
        try:
            with _explained():
                times = self._engine.wait(ticket.id)
            stream: Stream = "nvme_read" if ticket.direction is Direction.read else "nvme_write"
            self._timings.add(stream, ticket.purpose, *times)
        except StorageError as error:
            # Tracebacks hold the tensors of whoever came across it.
            ticket.error, error.__context__ = error.with_traceback(None), None
        self._finish(ticket)
        ticket.finished, ticket.tensor = True, None
        self._live.pop(ticket.id, None)

    def _reap(self) -> None:
        """Let go of the memory of transfers that nobody waited for yet."""
        for number in self._engine.finished():
            ticket = self._live.get(number)
            # Where the lock is taken, another thread waits for the transfer, and collects it.
            if ticket is not None and ticket.lock.acquire(blocking=False):
                try:
                    self._collect(ticket)
                finally:
                    ticket.lock.release()

    # ---- memory

    def register(self, tensor: Tensor) -> bool:
        """Pin the memory of ``tensor``, which is transferred again and again; True where the kernel permits it.

        It is kept alive until :meth:`close`.
        """
        address = tensor.data_ptr()
        self._registered[address] = tensor  # before the kernel has it: a handler of signals may raise in between
        if self._engine.register_memory(address, tensor.numel() * tensor.element_size()):
            return True
        del self._registered[address]
        return False

    def map(self, extent: Extent) -> _core.FileMapping:
        """The extent as memory that is shared with its file; the same one while it is in use."""
        self._check_extent(extent)
        if extent.bytes == 0:
            raise ValueError("an empty extent cannot be mapped")
        mapping = self._mappings.get(extent)
        if mapping is None:
            parts = self._parts(extent.offset, extent.room)
            with _explained(_TOO_MANY if len(self._slabs) > 1 else ""):
                mapping = _core.FileMapping([(self._slabs[slab].fd, place, size) for slab, place, _, size in parts])
            with self._mappings_lock:
                self._mappings[extent] = mapping
        return mapping

    def _mapped(self) -> list[tuple[Extent, _core.FileMapping]]:
        """Extents with their mappings; other threads may map more meanwhile."""
        with self._mappings_lock:
            return list(self._mappings.items())

    def drop_pages(self, extents: Iterable[Extent]) -> None:
        """Keep nothing of what was touched through mappings in this process's memory; the system's cache may."""
        for extent in extents:
            mapping = self._mappings.get(extent)
            if mapping is not None:
                mapping.drop(0, extent.bytes)

    def is_touched(self, extent: Extent, offset: int, size: int) -> bool:
        """Whether somebody may have read or written some bytes of an extent through its mapping since they were last
        transferred to: always where direct I/O is not possible, and as long as the system keeps what was touched."""
        mapping = self._mappings.get(extent)
        return mapping is not None and mapping.any_resident(offset, size)

    def modified(self) -> list[int]:
        """When the files were last written to, in whatever way, in ticks of the system's clock: milliseconds."""
        return [os.fstat(slab.fd).st_mtime_ns for slab in self._slabs]

    def _prepare(self, ticket: Ticket, mapping: _core.FileMapping | None, offset: int) -> None:
        """Bring writes through a mapping to the disk before direct I/O reads there, or writes over it."""
        if mapping is None:
            return
        if ticket.direction is Direction.write:
            mapping.drop(offset, ticket.bytes)
        for slab, place, _, size in self._parts(ticket.offset, ticket.bytes):
            if self._slabs[slab].direct:
                self._slabs[slab].flush(place, size)
                if ticket.direction is Direction.write:
                    self._slabs[slab].drop(place, size)

    def _finish(self, ticket: Ticket) -> None:
        """Let mappings show the bytes that direct I/O has written: forget pages that were read meanwhile."""
        if ticket.direction is Direction.read or not self._mappings:
            return
        first, last = ticket.offset, ticket.offset + ticket.bytes
        for extent, mapping in self._mapped():
            begin, end = max(first, extent.offset), min(last, extent.offset + extent.bytes)
            if begin < end:
                mapping.drop(begin - extent.offset, end - begin)
                for slab, place, _, size in self._parts(begin, end - begin):
                    self._slabs[slab].drop(place, size)

    # ---- the end

    def close(self) -> None:
        """Wait for every transfer, give the space back. Tensors that map extents stay usable."""
        if self._finalizer.alive:
            self._engine.close()
            for ticket in list(self._live.values()):
                with ticket.lock:
                    self._collect(ticket)
            self._finalizer()
            self._registered.clear()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def huge_tensor(size: int) -> Tensor:
    """``size`` zero bytes that start at a multiple of 2 MiB, on huge pages where the kernel gives them."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(_core.HugeMemory(size), dtype=torch.uint8, count=size)


def _shut(
    pid: int, engine: _core.IoEngine, slabs: list[_core.Slab], live: dict[int, Ticket], begun: list[Ticket]
) -> None:
    if os.getpid() == pid:  # else a child's copy, whose engine does nothing
        engine.close()
    live.clear()
    begun.clear()
    slabs.clear()


@contextmanager
def _explained(without_memory: str = "") -> Iterator[None]:
    """Errors of the core as our own, with file and errno, and a hint where there is no memory."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        text, _, hint = (error.strerror or str(error)).partition("\n\nhint: ")
        where = error.filename
        message = text if where is None or str(where) in text else f"{where}: {text}"
        hint = hint or (without_memory if error.errno == ENOMEM else "")
        raise StorageError(message, hint, errno=error.errno, path=where) from None


def _stripe_of(size: int) -> int:
    return max(1, -(-size // (_MOST_STRIPES * STRIPE))) * STRIPE


@functools.cache
def _say_once(text: str, *, warn: bool) -> None:
    log.log(logging.WARNING if warn else logging.INFO, text)
