"""Runs the passes, stage by stage, and says what each did."""

from __future__ import annotations

import logging

from torch import fx

from zerograph.compiler.frame import Frame
from zerograph.core.files.planfile import PassRecord, graph_diff
from zerograph.graph.nodes import Pair
from zerograph.passes import PIPELINE, Stage

log = logging.getLogger(__name__)

MOST_NODES = 5000
"""The most nodes of a graph kept as text, to show what passes did to it: a deep one is long, and repeats itself."""


def rewrite(frame: Frame, kind: str, target: fx.GraphModule | Pair, *stages: Stage) -> None:
    """Run the passes of ``stages`` on ``target`` in place; each leaves a valid graph, and logs one number.

    The Python of the graphs is not written again: nobody calls them.

    Args:
        kind: what logs and plan files call the graph: "joint", "forward", "backward" or "inference".
    """
    modules = target[:2] if isinstance(target, Pair) else (target,)
    shown = "graph" in stages or len(modules[0].graph.nodes) <= MOST_NODES

    def text() -> str:
        return frame.compilation.text_of(modules[0]) if shown else ""

    before = text()
    for step in (step for step in PIPELINE if step.stage in stages):
        # Passes of the stage "traced" run before there is a plan: capture reads what they leave.
        edits = step.run(target, None if step.stage == "traced" else frame.plan)
        for gm in modules:
            gm.graph.lint()
        log.debug("%s of frame %d: pass %s: %d", kind, frame.index, step.name, edits)
        after = text()
        frame.passes.append(PassRecord(kind, step.name, edits, graph_diff(before, after)))
        before = after
