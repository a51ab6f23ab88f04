"""The passes, as one list. Each carries out a part of the plan on FX graphs and decides nothing.

A pass takes what its stage names, and the plan (what reads none takes it all the same). It edits in place, may expect
a valid graph and leaves a valid graph, and returns one number: how much it did. ``compiler/driver.py`` runs the list,
and ``compiler/pipeline.py`` has it among all rewrites of a graph.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from zerograph.passes.canonicalize import canonicalize
from zerograph.passes.differentiate_loss import differentiate_loss
from zerograph.passes.fetch import fetch
from zerograph.passes.gather import gather
from zerograph.passes.hoist import hoist
from zerograph.passes.localize import localize
from zerograph.passes.name_activations import name_activations
from zerograph.passes.offload import offload
from zerograph.passes.order_saved import order_saved
from zerograph.passes.prefetch import prefetch
from zerograph.passes.prepare_parts import prepare_parts
from zerograph.passes.recompute import recompute
from zerograph.passes.reduce import reduce
from zerograph.passes.separate_effects import separate_effects
from zerograph.passes.spill import spill
from zerograph.passes.tile import tile
from zerograph.passes.tile_tokens import tile_tokens
from zerograph.passes.verify import verify
from zerograph.passes.verify_reduced import verify_reduced

Kind = Literal["forward", "backward", "inference"]
Stage = Literal["dynamo", "traced", "planned", "joint", "pair", "graph", "lowered"] | Kind
"""The input of a pass, or of another rewrite.

dynamo, lowered: Dynamo's graph, and one that is lowered to a program; no pass takes these
traced, planned: the graph of a whole step (joint, or of an evaluation), before and after it has a plan
joint: that of a training step
pair: what the partitioner makes of it, a :class:`~zerograph.graph.nodes.Pair`
graph: what becomes a program, of each kind
forward, backward, inference: that of one kind
"""


class Pass(NamedTuple):
    """One step of the pipeline, or another step from a graph to the next."""

    stage: Stage
    run: Callable[..., Any]

    @property
    def name(self) -> str:
        """The name in logs, plan files and ``zerograph passes``."""
        return self.run.__name__

    @property
    def does(self) -> str:
        """The first paragraph about it: of the file of a pass, else of the function."""
        is_pass = self.run.__module__ == f"{__name__}.{self.name}"
        text = inspect.getdoc(sys.modules[self.run.__module__] if is_pass else self.run) or ""
        return " ".join(text.partition("\n\n")[0].replace("``", "").split())


PIPELINE: tuple[Pass, ...] = (
    Pass("traced", canonicalize),
    Pass("traced", name_activations),
    # the planner reads the graph, and Inductor's own passes simplify it
    Pass("planned", localize),
    Pass("joint", differentiate_loss),
    # behind what moves to the forward
    Pass("joint", recompute),
    Pass("joint", prepare_parts),
    # the partitioner splits it
    Pass("pair", order_saved),
    # before anything looks at who reads what last, and in which interval
    Pass("pair", hoist),
    Pass("pair", offload),
    # first: AOTAutograd puts tokens before the inputs once the graph is split
    Pass("graph", separate_effects),
    # before gathers, whose buckets are freed behind their last tile
    Pass("graph", tile_tokens),
    # behind tiles of tokens, each of which reads all tiles of a weight; before the gathers, which take one for a bucket
    Pass("graph", tile),
    Pass("graph", gather),
    Pass("graph", prefetch),
    Pass("graph", fetch),
    # behind the gathers, at whose cuts reductions start
    Pass("graph", reduce),
    Pass("graph", spill),
    Pass("graph", verify),
    Pass("backward", verify_reduced),
)
"""All passes, in the order in which they run."""
