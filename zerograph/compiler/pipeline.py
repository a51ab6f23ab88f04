"""Every rewrite of a graph, from Dynamo's to the segments that run: the passes, and what the compiler does around them.

``compiler/driver.py`` runs them in this order; ``zerograph passes`` prints the list.
"""

from __future__ import annotations

from collections.abc import Iterator

from zerograph.compiler.loss_only import return_loss_only
from zerograph.compiler.lowering.lower import keep_together
from zerograph.compiler.lowering.own_groups import use_own_groups
from zerograph.compiler.lowering.segments import interpret
from zerograph.compiler.parameter_mutations import refuse_mutations
from zerograph.compiler.repetition.shorten import few_layers
from zerograph.compiler.shard_inputs import take_local_shards
from zerograph.compiler.torch_private import simplify_joint, split_by_minimum_cut
from zerograph.compiler.unsharded_parameters import compute_with_unsharded
from zerograph.graph.layers import name_model
from zerograph.passes import PIPELINE, Pass, Stage


def _passes(*stages: Stage) -> Iterator[Pass]:
    return (step for step in PIPELINE if step.stage in stages)


REWRITES: tuple[Pass, ...] = (
    Pass("dynamo", compute_with_unsharded),
    Pass("dynamo", refuse_mutations),
    Pass("dynamo", name_model),
    Pass("dynamo", return_loss_only),
    Pass("dynamo", take_local_shards),
    Pass("dynamo", few_layers),
    *_passes("traced"),
    Pass("planned", simplify_joint),
    *_passes("planned", "joint"),
    Pass("joint", split_by_minimum_cut),
    *_passes("pair", "graph", "forward", "backward", "inference"),
    Pass("lowered", use_own_groups),
    Pass("lowered", keep_together),
    Pass("lowered", interpret),
)
"""All of them, in the order in which a graph goes through them."""
