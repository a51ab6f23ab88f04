"""Why a model could not be traced, in its author's terms: the exception of its own code, or what breaks the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from traceback import FrameSummary

from zerograph.core.errors import UnsupportedError, ZeroGraphError
from zerograph.core.tracebacks import line_of, users_line
from zerograph.dryrun.torch_private import NEEDS_VALUES, Untraced, breaks_graph

_ALL_TOO_GENERAL = ("Please report", "It may be possible to write", "This is likely to be a Dynamo bug")
"""How those of Dynamo's hints begin that a model's author can do nothing with."""


def explain_failure(error: Exception, call: Callable[[], object]) -> ZeroGraphError | None:
    """The error that explains ``error``, which tracing a model raised; None where that is not about the model.

    Args:
        call: runs the forward as its author wrote it, on fake tensors. Dynamo reports an exception of the code that it
            traces as a graph break, under a name of its own; a plain call raises the exception itself.
    """
    own = _raised_by(call)
    if own is not None and not (breaks_graph(error) and isinstance(own, RuntimeError)):
        return _model_raises(own)  # what needs values is a RuntimeError of fake tensors; the graph break says more then
    return _untraced(error) if isinstance(error, Untraced) else None


def _raised_by(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except NEEDS_VALUES:
        return None  # a limit of fake tensors
    except Exception as error:
        return error
    return None


def _model_raises(error: Exception) -> UnsupportedError:
    line = line_of(error)
    hint = "the function of the model may return (model, inputs), for a forward that takes something else"
    if line is not None:
        hint = f"mend {line.filename}:{line.lineno}; -v shows the traceback"
    found = UnsupportedError(
        f"the model raises {type(error).__name__}: {' '.join(str(error).split())}{_at(line)}", hint
    )
    found.__cause__ = error
    return found


def _untraced(error: Untraced) -> UnsupportedError:
    lines = [line.strip() for line in error.msg.strip().splitlines()]
    explanation = _starting(lines, "Explanation: ")
    hints = [hint for hint in _starting(lines, "Hint: ") if not hint.startswith(_ALL_TOO_GENERAL)]
    found = UnsupportedError(
        f"the model does not trace into one graph on the meta device: {lines[0]}{_at(users_line(error.real_stack))}"
        + "".join(f"\n  {text}" for text in explanation),
        (hints or ["give a model whose forward neither needs values nor breaks the graph"])[0],
    )
    found.__cause__ = error
    return found


def _starting(lines: Iterable[str], word: str) -> list[str]:
    return [line.removeprefix(word) for line in lines if line.startswith(word)]


def _at(frame: FrameSummary | None) -> str:
    return "" if frame is None else f"\n  at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"
