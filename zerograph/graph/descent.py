"""Recursion over nodes on a stack of our own: graphs are deeper than Python's."""

from __future__ import annotations

from collections.abc import Callable, Iterator


def descend(step: Callable[..., Iterator[tuple[object, ...]]], *args: object) -> None:
    """Call ``step`` with ``args``, and for each tuple that it yields call it with that one, before it goes on.

    So a function that would call itself yields the arguments instead.
    """
    stack = [step(*args)]
    while stack:
        deeper = next(stack[-1], None)
        if deeper is None:
            stack.pop()
        else:
            stack.append(step(*deeper))
