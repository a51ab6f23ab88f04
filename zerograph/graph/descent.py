"""Search and recursion over nodes, on a stack of our own: graphs are deeper than Python's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import fx


def reached(start: Iterable[fx.Node], onward: Callable[[fx.Node], Iterable[fx.Node]]) -> Iterator[fx.Node]:
    """Yield the nodes of ``start``, and all nodes that ``onward`` leads to from them, each once, the nearest first."""
    seen, waiting = set[fx.Node](), list(start)
    for node in waiting:
        if node not in seen:
            seen.add(node)
            yield node
            waiting += onward(node)


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
