"""The checks of ``zerograph doctor``: every one is a function that tries a thing and returns a :class:`Finding`."""

from zerograph.cli.checks.finding import Finding, State, attempt

__all__ = ["Finding", "State", "attempt"]
