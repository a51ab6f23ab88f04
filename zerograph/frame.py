"""One traced frame: its plan, its programs, and the agreement of all ranks about them."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from torch import fx

from zerograph.compiler.unfold import Repeat
from zerograph.core.plan import Plan
from zerograph.core.planfile import PassRecord, changes
from zerograph.core.step import Step
from zerograph.runtime.executor import Runtime
from zerograph.runtime.program import Program
from zerograph.runtime.residency import GatheredCache

if TYPE_CHECKING:
    from zerograph.api import Backend

log = logging.getLogger(__name__)


class Frame:
    """What compiling one Dynamo graph produces, filled in as compilation goes on."""

    def __init__(self, backend: Backend, index: int, code: str) -> None:
        self.backend, self.index, self.code = backend, index, code
        self.step: Step
        self.plan: Plan
        self.runtime: Runtime
        self.programs: dict[str, Program] = {}
        self.passes: list[PassRecord] = []
        self.repeat: Repeat | None = None  # the joint graph from a few of its layers, where they are alike

    def planned(self, step: Step, plan: Plan) -> None:
        """The planner has decided; from here on the runtime's shared parts exist."""
        self.step, self.plan = step, plan
        cache = GatheredCache(plan, self.backend.steps, self.backend.hold)
        backend = self.backend
        self.runtime = Runtime(
            self.index, backend.communicator, cache, backend.hold, backend.telemetry, backend.device, self.code
        )

    def text_of(self, gm: fx.GraphModule, most: int = sys.maxsize) -> str:
        """The graph as text, where anyone will read it and it has no more than ``most`` nodes."""
        return "" if self.backend.runs or len(gm.graph.nodes) > most else str(gm.graph)

    def passed(self, kind: str, name: str, edits: int, before: str, gm: fx.GraphModule) -> str:
        """A pass has rewritten the graph of that kind, of which ``before`` was the text; returns what it is now."""
        log.debug("%s of frame %d: pass %s: %d", kind, self.index, name, edits)
        after = self.text_of(gm) if edits and before else before
        if not self.backend.runs:
            self.passes.append(PassRecord(kind, name, edits, changes(before, after)))
        return after

    def lowered(self, program: Program, seconds: float) -> None:
        """A graph of this frame became a program, ``seconds`` after its passes began."""
        self.programs[program.kind] = program
        self.backend.lowered(seconds)
        log.debug("frame %d %s:\n%s", self.index, program.kind, program)
