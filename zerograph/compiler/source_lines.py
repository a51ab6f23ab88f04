"""The user's line that a node of a graph comes from."""

from __future__ import annotations

import re
from pathlib import Path

from torch import fx


def source_line(node: fx.Node) -> str:
    """``file:line`` of the user's code that ``node`` comes from, innermost frame; empty when unknown.

    Where a parameter is read, that is not the property that reads it.
    """
    # The trace is text, as Dynamo keeps it, outermost frame first.
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    # Reading `self.weight` runs a property of sharding's: its own lines would stand for every parameter of the model.
    return next((f"{file}:{line}" for file, line in reversed(found) if file not in _READERS), "")


_SHARDING = Path(__file__).parents[1] / "sharding"
_READERS = frozenset(str(_SHARDING / name) for name in ("module_classes.py", "forward.py"))
