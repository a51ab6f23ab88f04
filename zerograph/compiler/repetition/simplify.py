"""Inductor's own passes over the graph of a step, or over a few of its layers."""

from __future__ import annotations

import logging

from torch import fx

from zerograph.compiler.repetition.layer_nodes import NotRepeated
from zerograph.compiler.repetition.repeat import Repeat
from zerograph.compiler.torch_private import simplify_joint
from zerograph.passes import PIPELINE

log = logging.getLogger(__name__)


def simplified(gm: fx.GraphModule, repeat: Repeat | None) -> fx.GraphModule:
    """Run Inductor's own passes on the graph of a step: attention fusions, constants, needless views and casts.

    Where ``gm`` came of a few layers that are alike, they run on those.

    Returns:
        The graph to go on with.
    """
    if repeat is not None and repeat.full.gm is gm:
        try:
            return _simplified_once(repeat)
        except NotRepeated as reason:  # random operators are numbered through all layers
            log.debug("simplifying all layers: %s", reason)
    simplify_joint(gm)
    return gm


def _simplified_once(repeat: Repeat) -> fx.GraphModule:
    """The graph of all layers, from that of the traced ones after our passes and Inductor's.

    Raises:
        NotRepeated: they did not do the same to every layer.
    """
    few = repeat.few.gm
    # Our passes that came before Inductor's on the whole graph, so that both graphs stay alike.
    for step in (step for step in PIPELINE if step.stage == "traced"):
        step.run(few, None)
        few.graph.lint()
    simplify_joint(few)
    return repeat.all_layers()
