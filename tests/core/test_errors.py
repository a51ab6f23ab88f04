"""Errors end with a hint and are what Python programs expect to catch."""

from __future__ import annotations

import pytest

from zerograph.core import errors


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.UnsupportedError, NotImplementedError),
        (errors.ShardingError, RuntimeError),
        (errors.CollectiveMismatch, RuntimeError),
        (errors.InvariantError, AssertionError),
        (errors.CheckpointError, RuntimeError),
    ],
)
def test_errors_are_ours_and_the_builtin_kind(kind: type[errors.ZeroGraphError], builtin: type[Exception]) -> None:
    with pytest.raises(builtin) as caught:
        raise kind("what failed", "what to do")
    assert isinstance(caught.value, errors.ZeroGraphError)
    assert str(caught.value) == "what failed\n\nhint: what to do"
    assert caught.value.hint == "what to do"


def test_without_a_hint_the_message_stands_alone() -> None:
    assert str(errors.ZeroGraphError("what failed")) == "what failed"
