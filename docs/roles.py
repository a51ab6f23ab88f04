"""Docstrings name code by roles (``:func:`zerograph.shard` ``), which Markdown has not: in pages they become code."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|func|meth|mod):`([^`]+)`")


class Roles(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
