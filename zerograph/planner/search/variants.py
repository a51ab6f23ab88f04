"""The variants of a step, with its loss and tokens whole or in tiles, and the spaces of their plans."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from zerograph.core.config import DEFAULT_BUCKET_SIZE, DEFAULT_PREFETCH
from zerograph.core.machine import Machine
from zerograph.core.plan import Plan, compute_dtype
from zerograph.core.step import Step, TokenRegion
from zerograph.planner.profile.liveness import Graph, Mode
from zerograph.planner.profile.loss import LOSS_TILES, Head, head_of, loss_tiles, tiled, with_loss_tiles
from zerograph.planner.profile.regions import Profile, Works, profile
from zerograph.planner.profile.tiling import tiles_wanted
from zerograph.planner.profile.token_tiles import by_token, regions_of, regions_with, tiles_to_try, with_token_tiles
from zerograph.planner.programs.rules import plan_step, recomputed_layers
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.search_space import SearchSpace
from zerograph.planner.search.selective import stops
from zerograph.sim.costs import on
from zerograph.sim.rates import Rates

MIB = 2**20
BUCKET_SIZES = (8 * MIB, 16 * MIB, DEFAULT_BUCKET_SIZE, 64 * MIB, 128 * MIB)
MOST_TILES = 16
"""Tiles of one parameter, at most: each costs a collective of its own, and the planner a few tasks."""
ALL_TILES = 1024
"""Tiles of a step, at most, unless two of each parameter are more: a plan of so many takes the planner 0.1 s."""


class Variant(NamedTuple):
    """A step with its loss whole, or in tiles, each of which reads the parameters of ``head`` whole; and with tokens
    whole, or with all layers recomputed in tiles of them, or in parts of the batch."""

    profile: Profile
    loss_tiles: int = 1
    head: Head | None = None
    token_tiles: int = 1
    by_sample: bool = False


def variants_of(graph: Graph, constraints: Constraints, machine: Machine) -> list[Variant]:
    """The step with its loss whole and, where tiles are open, in each number of tiles.

    Each has the recompute options between nothing and all saved where the search may choose them. Those are of layers,
    which the tiles of the loss do not touch.
    """
    base: Mode = "none" if constraints.recompute == "none" else "auto"
    saved_sets = {}
    if constraints.recompute == "auto" and graph.step.training:
        rates = Rates(machine, constraints.world_size, compute_dtype(graph.step.params), constraints.replicas)
        saved_sets = stops(graph, rates)
    head = head_of(graph) if constraints.tiles_loss else None
    losses = (1, *_loss_tiles(constraints, head)) if head is not None else (1,)
    if isinstance(constraints.loss, int):
        losses = losses[-1:]
    tokens = [(1, False)]
    if isinstance(constraints.tokens, int):
        tokens = [(constraints.tokens, constraints.by_sample)]
    elif constraints.tokens == "auto":
        tokens += tiles_to_try(graph.step)
    found, works = list[Variant](), Works()
    for number, by_sample in tokens:
        regions = _regions(graph.step, constraints, by_sample) if number > 1 else []
        if found and not regions:
            continue  # no layer can be divided so
        step = by_token(graph.step, regions, number) if regions else graph.step
        for tiles in losses:
            here = tiled(step, head, tiles) if head is not None and tiles > 1 else step
            profiled = profile(graph if here is graph.step else here, base, saved_sets, works)
            whole = (profiled, tiles, head if tiles > 1 else None)
            found.append(Variant(*whole, number, by_sample) if regions else Variant(*whole))
    return found


def same_variants(constraints: Constraints, other: Constraints) -> bool:
    """Whether a step has the same variants (:func:`variants_of`) for both."""
    return _of_variants(constraints) == _of_variants(other)


def _of_variants(constraints: Constraints) -> tuple[object, ...]:
    """All that a step's variants are made from."""
    c = constraints
    ranks, loss = (c.world_size, c.replicas), (c.tiles, c.tiles_loss, c.loss)
    tokens = None if c.tokens in (None, 1) else (c.tokens, c.by_sample, c.tiling, c.offload != "none")
    return (c.recompute, c.bucket_size, *ranks, *loss, tokens)


def _loss_tiles(constraints: Constraints, head: Head) -> tuple[int, ...]:
    if isinstance(constraints.loss, int):
        return (constraints.loss,)
    return loss_tiles(head, constraints.bucket_size or DEFAULT_BUCKET_SIZE) if constraints.loss is None else LOSS_TILES


def _regions(step: Step, constraints: Constraints, by_sample: bool) -> list[TokenRegion]:
    """The regions in tiles of tokens, or of samples, where any is: in layers that can be, with weights at hand."""
    layers = recomputed_layers(step, "full" if constraints.recompute == "auto" else constraints.recompute)
    whole = dict[str, int]()
    if by_sample or constraints.offload != "none":
        size = constraints.bucket_size or DEFAULT_BUCKET_SIZE
        whole = tiles_wanted(constraints.tiling, step, size)
    return regions_with(step, by_sample, layers, whole)


def spaces_of(
    step: Step,
    constraints: Constraints,
    machine: Machine,
    states: int,
    moments: int,
    variant: Variant,
    known: Sequence[SearchSpace] = (),
    beside: Sequence[SearchSpace] = (),
) -> Iterator[SearchSpace]:
    """One per distinct way to put parameters into buckets; of the same step and machine others may be ``known``, and
    those of other variants stand ``beside`` them."""
    seen = set()
    for size in BUCKET_SIZES if constraints.bucket_size is None else (constraints.bucket_size,):
        plan = plan_step(
            step,
            stage=constraints.sharding,
            world_size=constraints.world_size,
            bucket_size=size,
            replicas=constraints.replicas,
            hosts=constraints.hosts,
            prefetch=DEFAULT_PREFETCH if constraints.prefetch is None else constraints.prefetch,
            recompute="full" if variant.token_tiles > 1 and constraints.recompute == "auto" else constraints.recompute,
            saved=constraints.saved or "device",
            update="host" if constraints.update == "auto" else constraints.update,
            overlap="none" if constraints.overlap == "auto" else constraints.overlap,
            tiles=tiles_wanted(constraints.tiling, step, size),
            whole_layers=variant.by_sample,
        )
        untiled: tuple[str, ...] = ()
        if variant.head is not None:
            plan, untiled = with_loss_tiles(plan, variant.head, variant.loss_tiles), variant.head.params
        if variant.token_tiles > 1:
            leaves = constraints.offload != "none"
            plan = with_token_tiles(plan, step, variant.token_tiles, variant.by_sample, leaves=leaves)
            untiled += tuple(name for region in regions_of(step, variant.by_sample) for name in region.params)
        # A model smaller than a bucket gets the same buckets for several sizes.
        if plan not in seen:
            seen.add(plan)
            rates = Rates.of(machine, plan)
            most = most_tiles(plan, size, untiled) if constraints.tiles else ()
            if step.tilable is not None and constraints.tiles:
                most = tuple(n if plan.buckets[i].params[0].name in step.tilable else 1 for i, n in enumerate(most))
            held = on("device", states)
            params = [bucket.params for bucket in plan.buckets]
            alike = (s for s in known if s.scheduler.profile is variant.profile)
            like = next((s for s in alike if [bucket.params for bucket in s.plan.buckets] == params), None)
            yield SearchSpace(
                variant.profile, plan, rates, held, moments=moments, most_tiles=most, size=size, like=like,
                beside=beside,
            )  # fmt: skip


def most_tiles(plan: Plan, size: int, untiled: Container[str] = ()) -> tuple[int, ...]:
    """In how many tiles each bucket may be: 1 unless it is one parameter that is larger than ``size`` when gathered,
    and none of those that have to be ``untiled``."""
    alone = (b for b in plan.buckets if len(b.params) == 1 and b.params[0].sharded and b.params[0].name not in untiled)
    large = {b.index for b in alone if b.gathered_bytes > size}
    most = min(MOST_TILES, max(2, ALL_TILES // max(1, len(large))))
    return tuple(min(most, b.params[0].chunk) if b.index in large else 1 for b in plan.buckets)
