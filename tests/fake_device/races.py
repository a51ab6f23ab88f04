"""What a program told the fake device, held against torch's own detector of races (``torch.cuda._sanitizer``).

It reports two accesses to one block of memory, of which one is a write, by streams of which neither waited for the
other. The end of a block's life counts as a write by the stream that uses it again.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from fake_device import device
from torch.cuda._sanitizer import EventHandler


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Inside everything is traced; the list gets what races when it is left."""
    library, found = device.load(), list[str]()
    library.synchronize()
    library.begin_trace()
    try:
        yield found
    finally:
        library.synchronize()
        found += races(library.end_trace())


def races(trace: list[Any]) -> list[str]:
    """The races of what the device was told, for people, each pair of kernels once."""
    handler, streams, marks, found = EventHandler(), {0}, set[int](), dict[str, None]()
    for told in trace:
        if told.stream > 0 and told.stream not in streams:
            handler._handle_stream_creation(told.stream)
            streams.add(told.stream)
        if told.what == "record":
            handler._handle_event_creation(told.mark)
            marks.add(told.mark)
            handler._handle_event_record(told.mark, told.stream)
        elif told.what == "drain":
            if told.stream < 0:
                handler._handle_device_synchronization()
            else:
                handler._handle_stream_synchronization(told.stream)
        elif told.what == "kernel":
            writes = set(told.writes)
            wrong = handler._handle_kernel_launch(
                told.stream, set(told.reads) - writes, writes, set(), told.name, defaultdict(list)
            )
            found |= dict.fromkeys(map(_described, wrong))
        elif told.mark in marks:  # others are of what was told before, which has been done
            if told.what == "hold":
                handler._handle_event_wait(told.mark, told.stream)
            else:
                handler._handle_event_synchronization(told.mark)
    return list(found)


def _described(error: Any) -> str:
    now, before = error.current_access, error.previous_access
    return (
        f"{now.operator} ({now.type.name}, stream {now.stream}) and {before.operator} ({before.type.name}, "
        f"stream {before.stream}) of one block of memory, and neither stream waited for the other"
    )
