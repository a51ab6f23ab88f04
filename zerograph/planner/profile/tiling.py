"""In how many tiles the user wants which parameters (``zerograph.backend(tile=...)``), and which run in one loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from fnmatch import fnmatchcase

from zerograph.core.config import TileOption
from zerograph.core.errors import ConfigError
from zerograph.core.plan import Bucket, Plan
from zerograph.core.rows import largest
from zerograph.core.step import Mlp, Param, Step


def tiles_wanted(wanted: TileOption, step: Step, world_size: int, bucket_size: int) -> dict[str, int]:
    """Tiles of each parameter of ``step`` that is to be in several.

    A number is that of parameters that are larger than a bucket and can be in tiles; patterns name theirs, of which the
    first counts that fits, and vectors that they fit too stay untiled.

    Raises:
        ConfigError: a parameter that was named cannot be in tiles, or not in so many.
    """
    if isinstance(wanted, str):
        return {}
    tilable = set(step.tilable or ())
    if isinstance(wanted, int):
        large = (p for p in step.params if p.name in tilable and p.gathered_bytes > bucket_size)
        found = dict.fromkeys(large, wanted)
    else:
        named = ((p, tiles_of(p.name, wanted)) for p in step.params if len(p.shape) > 1)
        found = {p: tiles for p, tiles in named if tiles > 1}
    for param, tiles in found.items():
        _require_tilable(param, tiles, tilable, world_size)
    return {p.name: tiles for p, tiles in found.items() if tiles > 1}


def tiles_of(name: str, patterns: Iterable[tuple[str, int]]) -> int:
    """How many tiles ``patterns`` have for the parameter of that name; 1 where none fits."""
    return next((tiles for pattern, tiles in patterns if fnmatchcase(name, pattern)), 1)


def in_loops(plan: Plan, step: Step) -> Plan:
    """``plan`` with the weights of each MLP in one loop over its middle, where that can be; elsewhere each weight has
    tiles of its rows, by itself."""
    alone = _alone(plan)
    buckets, middle = list(plan.buckets), set[str]()
    for mlp in step.mlps:
        own, dims = _buckets_of(mlp, alone), dict(mlp.weights)
        if any(bucket.tiles > 1 for bucket in own) and not _why_not_looped(mlp, own, plan.world_size):
            for bucket in own:
                buckets[bucket.index] = replace(bucket, dim=dims[bucket.params[0].name], loop=mlp.name)
            middle.update(mlp.middle)
    return _without_middle(replace(plan, buckets=tuple(buckets)), step, middle)


def _why_not_looped(mlp: Mlp, own: Sequence[Bucket], world_size: int) -> str:
    """Why weights of an MLP that are in tiles do not run in one loop; empty where they can, or none is in tiles."""
    tiles = {bucket.tiles for bucket in own}
    if tiles <= {1}:
        return ""
    if len(own) < len(mlp.weights) or len(tiles) > 1:
        text = ", ".join(f"{b.params[0].name} in {b.tiles}" for b in own)
        return f"its weights are in different numbers of tiles ({text})"
    moved = [b for b in own if not b.placement.parameters == b.placement.spilled == "device"]
    if moved:
        return (
            f"tiles of columns are not read and written piece by piece where {moved[0].name} has {moved[0].placement}"
        )
    share, (count,) = largest(mlp.hidden, world_size), tiles
    if count > share:
        return f"each rank has {share} of its {mlp.hidden} hidden places, which is less than {count} tiles"
    return ""


def looped(step: Step, plan: Plan) -> Step:
    """``step`` with MLPs in the loops of ``plan``: of their middles a tile is held at a time, and the backward computes
    them again. Each product moves about the same bytes: its weights are read once, in tiles or whole.

    Two tiles are counted: gathers and sums cut a loop where a whole layer's kernels would fuse, and what crosses such a
    cut is in memory beside what is made of it.
    """
    tiles = {loop: own[0].tiles for loop, own in plan.loops().items()}
    of = {name: tiles[mlp.name] for mlp in step.mlps if mlp.name in tiles for name in mlp.middle}
    if not of:
        return step
    values = (replace(v, bytes=min(v.bytes, -(-2 * v.bytes // of[v.name]))) if v.name in of else v for v in step.values)
    ops = (replace(op, again=True) if op.name in of and op.phase == "forward" else op for op in step.ops)
    return replace(step, ops=tuple(ops), values=tuple(values))


def unknown_loops(plan: Plan, step: Step) -> Iterator[str]:
    """The loops of ``plan`` that ``step`` has not, of the parameters that it reads."""
    for loop in strange_loops(plan, step):
        names = (f"{'columns' if b.dim else 'rows'} of {b.params[0].name}" for b in plan.loops()[loop])
        yield f"{loop} is in one loop over {' and '.join(names)}, and they are no MLP that can be"


def strange_loops(plan: Plan, step: Step) -> frozenset[str]:
    """The loops of ``plan`` whose weights are no MLP of ``step``."""
    known = {frozenset(mlp.weights) for mlp in step.mlps}
    own = {loop: frozenset((b.params[0].name, b.dim) for b in buckets) for loop, buckets in plan.loops().items()}
    return frozenset(loop for loop, weights in own.items() if weights not in known)


def not_looped(plan: Plan, step: Step) -> dict[str, str]:
    """The MLPs whose weights have tiles of their own, and why; those that run in one loop are not among them."""
    loops, alone = plan.loops(), _alone(plan)
    left = (mlp for mlp in step.mlps if mlp.name not in loops)
    found = {mlp.name: _why_not_looped(mlp, _buckets_of(mlp, alone), plan.world_size) for mlp in left}
    return {name: why for name, why in found.items() if why}


def _alone(plan: Plan) -> dict[str, Bucket]:
    """By parameter, the buckets that hold nothing else."""
    return {b.params[0].name: b for b in plan.buckets if len(b.params) == 1}


def _buckets_of(mlp: Mlp, alone: Mapping[str, Bucket]) -> list[Bucket]:
    """The buckets that hold a weight of ``mlp`` alone, in the order of the plan."""
    return sorted((alone[name] for name, _ in mlp.weights if name in alone), key=lambda bucket: bucket.index)


def _without_middle(plan: Plan, step: Step, middle: Set[str]) -> Plan:
    """``plan`` saving nothing of the ``middle`` of MLPs in loops, which is never whole."""
    names = {op.activation for op in step.passes if op.activation and op.name in middle}
    save = tuple(name for name in plan.save if name not in names)
    return replace(plan, save=save, offload=tuple(one for one in plan.offload if one[0] not in names))


def _require_tilable(param: Param, tiles: int, tilable: set[str], world_size: int) -> None:
    if param.name not in tilable:
        raise ConfigError(
            f"tile= wants {param.name} {list(param.shape)} in {tiles} tiles, and not only products and lookups use it, "
            "or it is not sharded",
            "tiles are of weights that nothing but products (x @ W.T, as nn.Linear's, and x @ W) and lookups "
            "(nn.Embedding) use: name others in the pattern",
        )
    rows = param.chunk(world_size)
    if tiles > rows:
        raise ConfigError(
            f"tile= wants {param.name} {list(param.shape)} in {tiles} tiles, and each of {world_size} ranks has "
            f"{rows} rows of it",
            f"{rows} tiles are the most",
        )


def refuse_unknown(wanted: TileOption, names: Iterable[str]) -> None:
    """Raises:
    ConfigError: a pattern fits none of the model's parameters.
    """
    known = list(names)
    for pattern, _ in wanted if isinstance(wanted, tuple) else ():
        if known and not any(fnmatchcase(name, pattern) for name in known):
            raise ConfigError(
                f"tile= has the pattern {pattern!r}, and no parameter of the model is called so",
                f"names are such as {known[0]!r}, and * stands for anything",
            )
