"""The errors ZeroGraph raises for what a user can cause.

Every message says what failed, with numbers and names, and ends with a blank line and ``hint:`` with the next thing
to do.
"""

from __future__ import annotations


class ZeroGraphError(Exception):
    """Base of all errors raised by ZeroGraph; ``hint`` is the next thing to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        self.hint = hint
        super().__init__(f"{message}\n\nhint: {hint}" if hint else message)


class ConfigError(ZeroGraphError, ValueError):
    """An argument of a function of ours or of an optimizer is wrong; the message names it."""


class UnsupportedError(ZeroGraphError, NotImplementedError):
    """A model, optimizer or wrapper that ZeroGraph cannot train correctly."""


class ShardingError(ZeroGraphError, RuntimeError):
    """A parameter could not be sharded, gathered or replaced."""


class CollectiveMismatch(ZeroGraphError, RuntimeError):
    """Ranks disagree about the collectives they are about to run; raised instead of hanging."""


class RankError(ZeroGraphError, RuntimeError):
    """Another rank failed, ended, or did not answer in time."""


class InvariantError(ZeroGraphError, AssertionError):
    """A compiled program breaks an invariant of the design: a bug in ZeroGraph, located."""


class CheckpointError(ZeroGraphError, RuntimeError):
    """A checkpoint or export cannot be written or read."""


class InfeasibleError(ZeroGraphError, RuntimeError):
    """No plan of a training step fits the memory it was given."""


class SizeError(ZeroGraphError, ValueError):
    """A step was asked for at a batch or sequence that the model cannot be run at."""


class StorageError(ZeroGraphError, OSError):
    """A transfer to or from offloaded tensors failed, or there is no room for them.

    Attributes:
        errno: of the system call, or None.
        filename: the file or folder, or None.
    """

    def __init__(self, message: str, hint: str = "", *, errno: int | None = None, path: str | None = None) -> None:
        super().__init__(message, hint)
        self.errno, self.filename = errno, path

    def __str__(self) -> str:
        return str(self.args[0])
