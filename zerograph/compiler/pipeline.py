"""Every rewrite of a graph, from Dynamo's to the segments that run: the passes, and what the compiler does around them.

``compiler/driver.py`` runs them in this order; ``zerograph passes`` prints the list.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from zerograph.compiler.loss_only import return_loss_only
from zerograph.compiler.lowering.lower import keep_together
from zerograph.compiler.lowering.own_groups import use_own_groups
from zerograph.compiler.lowering.segments import interpret
from zerograph.compiler.parameter_mutations import refuse_mutations
from zerograph.compiler.repetition.shorten import few_layers
from zerograph.compiler.repetition.simplify import simplified
from zerograph.compiler.shard_inputs import take_local_shards
from zerograph.compiler.torch_private import split_by_minimum_cut
from zerograph.compiler.unsharded_parameters import compute_with_unsharded
from zerograph.graph.layers import name_model
from zerograph.passes import PIPELINE, Stage


class Rewrite(NamedTuple):
    """One step from a graph to the next.

    Attributes:
        stage: of the graph that it is given: that of a pass, Dynamo's, or one that is lowered to a program.
        run: the function that does it.
    """

    stage: Stage | Literal["dynamo", "lowered"]
    run: Callable[..., Any]

    @property
    def name(self) -> str:
        """The name in lists."""
        return self.run.__name__

    @property
    def does(self) -> str:
        """The first paragraph about it: of the file of a pass, else of the function."""
        is_pass = self.run.__module__ == f"zerograph.passes.{self.name}"
        text = inspect.getdoc(sys.modules[self.run.__module__] if is_pass else self.run) or ""
        return " ".join(text.partition("\n\n")[0].replace("``", "").split())


def _passes(*stages: Stage) -> Iterator[Rewrite]:
    return (Rewrite(step.stage, step.run) for step in PIPELINE if step.stage in stages)


REWRITES: tuple[Rewrite, ...] = (
    Rewrite("dynamo", compute_with_unsharded),
    Rewrite("dynamo", refuse_mutations),
    Rewrite("dynamo", name_model),
    Rewrite("dynamo", return_loss_only),
    Rewrite("dynamo", take_local_shards),
    Rewrite("dynamo", few_layers),
    *_passes("traced"),
    Rewrite("planned", simplified),
    *_passes("planned", "joint"),
    Rewrite("joint", split_by_minimum_cut),
    *_passes("pair", "graph", "forward", "backward", "inference"),
    Rewrite("lowered", use_own_groups),
    Rewrite("lowered", keep_together),
    Rewrite("lowered", interpret),
)
"""All of them, in the order in which a graph goes through them."""
