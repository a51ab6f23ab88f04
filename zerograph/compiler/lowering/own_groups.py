"""Lets collectives that a graph has of the user's go over connections of ours, which end with an error.

Tensor parallelism brings functional collectives, which name their group by a constant. The groups are of the same
ranks in the same order, so that results are the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from zerograph.graph.torch_private import place_of_group


def use_own_groups(graph: fx.Graph, groups: Mapping[str, str]) -> int:
    """Let collectives use the group that ``groups`` has for the name of theirs; returns how many do."""
    changed = 0
    for node in graph.nodes if groups else ():
        place = place_of_group(node.target)
        if place is not None and node.args[place] in groups:
            node.update_arg(place, groups[node.args[place]])
            changed += 1
    return changed
