"""One traced frame: what was decided for it, and what it became."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from zerograph.compiler.compilation import Compilation
from zerograph.compiler.torch_private import traced_code
from zerograph.core.errors import ZeroGraphError
from zerograph.core.files.planfile import PassRecord
from zerograph.core.param_bytes import Plain
from zerograph.core.plan import Plan
from zerograph.core.program import Program
from zerograph.core.step import Step
from zerograph.runtime.executor.executor import Runtime


@dataclass(slots=True, eq=False)
class Frame:
    """The products of compiling one Dynamo graph, filled in as compilation goes on.

    Attributes:
        index: its number among the frames of its backend.
        code: the user's function that Dynamo traced, for people.
        plain: the parameters among its inputs, as far as they are not sharded.
        ends_at_break: whether the user's code goes on uncompiled, behind a graph break.
        step, plan: what it computes, and what is decided.
        runtime: what its programs share when they run; there is none in a dry run.
        programs: by kind: "forward" and "backward", or "inference".
        passes: what they did, in the order in which they ran.
        seconds: spent on passes, lowering and segments.
    """

    compilation: Compilation
    index: int
    code: str
    plain: Sequence[Plain] = ()
    ends_at_break: bool = False
    step: Step = field(init=False)
    plan: Plan = field(init=False)
    runtime: Runtime | None = None
    programs: dict[str, Program] = field(default_factory=dict)
    passes: list[PassRecord] = field(default_factory=list)
    seconds: float = 0.0


def traced_function() -> str:
    """The user's function that Dynamo is tracing, as ``name (file:line)``."""
    code = traced_code()
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def last_frame(frames: Sequence[Frame]) -> Frame:
    """The last training frame; the last of all where there is none.

    Raises:
        ZeroGraphError: nothing was compiled yet.
    """
    compiled = [f for f in frames if f.programs]
    if not compiled:
        raise ZeroGraphError("nothing was compiled yet", "call the compiled model once")
    # A graph break may leave frames without parameters, of which nobody asks.
    training = [f for f in compiled if "forward" in f.programs and f.plan.buckets]
    return (training or compiled)[-1]
