"""The decisions of the search: one for each that a plan states, with its choices and how each is applied.

A decision has items, for which it is changed one by one, in groups or all together: buckets, layers, or the step as a
whole. A new one is a field of :class:`~zerograph.core.plan.Plan` or :class:`~zerograph.core.plan.Bucket` and a function
in here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, TypeVar

from zerograph.core.config import DEFAULT_PREFETCH
from zerograph.core.cost import Cost
from zerograph.core.machine import Tier
from zerograph.core.param_bytes import gathered_bytes
from zerograph.core.plan import DEVICE, Placement, Plan
from zerograph.planner.programs.placement import STATES_OFFLOADED
from zerograph.planner.search.constraints import PREFETCHES, Constraints
from zerograph.planner.search.search_space import Candidate, SearchSpace, variant_of

T = TypeVar("T")
Item = Any
"""A bucket by its place, a layer or an activation by its name; the empty string for the whole step."""
Values = dict[Item, Any]
UNDER_WAY = (1, 2, 3, 4)
"""Reductions that may be under way at a time."""
FETCHES = (1, 2, 3, 4)
"""Layers before its own at which what a layer offloaded may begin to come back."""
MOST_SINGLE = 32
"""Activations of a step up to which single ones are offloaded: of more, layers are."""


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """One decision, for every item that it is made for.

    Attributes:
        choices: by item, the most rewarding item first; if they are ``ordered``, from the least memory to the fewest
            seconds.
        read: the value of every item under a plan.
        apply: a plan with other values for some items.
        alike: a key for each item; items with equal keys are interchangeable.
        gain: seconds per byte of an item's step from one choice to the next.
        frugal: values for all items together; for each tier one of these needs the least.
        fine: whether it only says when something begins, which matters little before the rest is decided.
    """

    choices: Mapping[Item, Sequence[Any]]
    read: Callable[[Plan], Mapping[Item, Any]]
    apply: Callable[[Plan, Values], Plan]
    ordered: bool = True
    alike: Mapping[Item, object] | None = None
    gain: Callable[[Item, Any], float] | None = None
    frugal: Sequence[Values] = ()
    fine: bool = False

    def changes(self, plan: Plan, groups: int) -> Iterator[Plan]:
        """``plan`` with this decision changed for one of at most so many groups of items.

        In a group of several items, those that are alike and have the same values count as interchangeable, whatever
        else is decided of them: one group of each kind is changed. Single items all are.
        """
        now = self.read(plan)
        for target in self._targets():
            found: dict[object, Values] = {}
            for group in in_runs(tuple(self.choices), groups):
                new, more = self._changed(group, now, target)
                if new:
                    alike = self.alike if len(group) > 1 and self.alike else {}
                    key = tuple((alike.get(item, item), now[item]) for item in group)
                    # Towards more, the first of those that are alike, the most rewarding; back, the last, which is
                    # missed least.
                    if key not in found or not more:
                        found[key] = new
            for new in found.values():
                yield self.apply(plan, new)

    def _targets(self) -> Sequence[object]:
        if self.ordered:
            return ("last", "more", "next", "previous", "less", "first")
        return list(dict.fromkeys(value for choices in self.choices.values() for value in choices))

    def _changed(self, group: Sequence[Item], now: Mapping[Item, Any], target: object) -> tuple[Values, bool]:
        """The new values of what changes in ``group``, and whether they come later among the choices."""
        new, more = {}, True
        for item in group:
            choices = self.choices[item]
            if self.ordered:
                at = _index(choices, now[item])
                last = len(choices) - 1
                to = {
                    "last": last, "more": (at + last + 1) // 2, "next": at + 1,
                    "previous": at - 1, "less": at // 2, "first": 0,
                }[str(target)]  # fmt: skip
                value = choices[max(0, min(to, last))]
            else:
                value = target if target in choices else now[item]
            if value != now[item]:
                new[item] = value
                more = _index(choices, value) > _index(choices, now[item])
        return new, more

    def steps(self, a: Plan, b: Plan) -> Iterator[tuple[float, Item, Any]]:
        """The steps from ``a`` to ``b``, item by item and choice by choice, with the seconds per byte of each."""
        before, after = self.read(a), self.read(b)
        for item, choices in self.choices.items():
            old, new = before[item], after[item]
            if old == new or new is None:
                continue
            gain = self.gain or (lambda item, value: 0.0)
            here, there = (_index(choices, value) for value in (old, new))
            between = choices[here + 1 : there] if self.ordered else ()
            yield from ((gain(item, value), item, value) for value in (*between, new))


def halfway(decisions: Iterable[Decision], a: Plan, b: Plan) -> Plan:
    """The plan half the way from ``a`` to ``b``: of each decision half the steps, the most rewarding first."""
    for decision in decisions:
        steps = sorted(decision.steps(a, b), key=lambda step: -step[0])
        if len(steps) > 1:
            a = decision.apply(a, {item: value for _, item, value in steps[: len(steps) // 2]})
    return a


# The decisions
# ------------------------------------------------------------------------------------------------------------


def of_step(field: str, choices: Sequence[Any]) -> Decision:
    """A decision for the step as a whole, on when something begins: a field of the plan."""
    return Decision(
        {"": choices},
        lambda plan: {"": getattr(plan, field)},
        lambda plan, values: replace(plan, **{field: values[""]}) if values else plan,
        frugal=[{"": choices[0]}],
        fine=True,
    )


def prefetch(choices: Sequence[int]) -> Decision:
    """How many buckets are gathered ahead, at most; those that begin later still do."""

    def apply(plan: Plan, values: Values) -> Plan:
        most = values.get("", plan.prefetch)
        # Their own starts would no longer be earlier than the new limit: they follow the plan's again.
        late = {b.index: None for b in plan.buckets if b.ahead is not None and b.ahead >= most}
        return replace(_with_buckets(plan, "ahead", late), prefetch=most)

    return Decision({"": choices}, lambda plan: {"": plan.prefetch}, apply, frugal=[{"": choices[0]}])


def residency(space: SearchSpace) -> Decision:
    """Which gathered buckets stay resident from the forward to the backward; those in tiles cannot. Where there are
    several hosts, each may keep in parts what came from others."""
    rates = space.scheduler.rates
    sizes = {b.index: max(1, gathered_bytes(b.params)) for b in space.plan.buckets}
    rewards = {index: rates.collective(size) / size for index, size in sizes.items()}
    again = {
        interval.bucket
        for phase in (space.scheduler.phases(space.plan) if space.plan.hosts > 1 else ())
        if phase.name == "backward"
        for interval in phase.intervals
    }
    choices = {b: ("use", "host", "backward") if b in again else ("use", "backward") for b in sizes}

    def apply(plan: Plan, values: Values) -> Plan:
        may = {b: v for b, v in values.items() if plan.buckets[b].tiles == 1}
        here = {b for b in may if plan.buckets[b].placement.parameters == "device"}
        return _with_buckets(plan, "residency", {b: v for b, v in may.items() if v != "host" or b in here})

    return Decision(
        {index: choices[index] for index in by_reward(list(rewards), rewards.__getitem__)},
        lambda plan: {index: plan.buckets[index].residency for index in rewards},
        apply,
        alike=_parts(space),
        gain=lambda item, _: rewards[item],
        frugal=[dict.fromkeys(rewards, "use")],
    )


def starts(space: SearchSpace, most: int) -> Decision:
    """How many intervals before its own each bucket is gathered, at most."""

    choices = dict.fromkeys(range(len(space.plan.buckets)), range(most + 1))
    return Decision(
        choices, lambda plan: dict(enumerate(plan.ahead())), with_starts, alike=_parts(space),
        frugal=[dict.fromkeys(choices, 0)], fine=True,
    )  # fmt: skip


def tiles(space: SearchSpace) -> Decision:
    """In how many tiles the parameter of a bucket is gathered and used; what is in tiles is not kept."""
    most, finest = space.most_tiles, space.finest
    choices: dict[Item, Sequence[int]] = {}
    for bucket, (count, fitting) in enumerate(zip(most, space.fewest_tiles(), strict=True)):
        if count > 1:
            # Of many tiles only some numbers are looked at.
            powers = (2**k for k in range(count.bit_length()))
            some = range(1, count + 1) if finest == most else {1, fitting, count, *powers}
            choices[bucket] = sorted(some, reverse=True)
    return Decision(
        choices, lambda plan: {index: plan.buckets[index].tiles for index in choices}, with_tiles, alike=_parts(space),
        frugal=[dict.fromkeys(choices, 1), {bucket: finest[bucket] for bucket in choices}],
    )  # fmt: skip


def placements(space: SearchSpace, open_placements: Sequence[Placement]) -> Decision:
    """Where the shards of each bucket live; what has nothing to offload stays on the device."""
    parts = {
        b.index: space.scheduler.bucket_parts(b.index, 1)[0].shards.at(STATES_OFFLOADED) for b in space.plan.buckets
    }
    sizes = {index: part.optimizer + part.frozen for index, part in parts.items()}
    choices: dict[Item, Sequence[Placement]] = {}
    for index in by_reward([index for index, size in sizes.items() if size], sizes.__getitem__):
        trained = any(p.sharded and p.trainable for p in space.plan.buckets[index].params)
        choices[index] = tuple(
            # A bucket that trains nothing has no gradients and states: placements of these alone would move nothing.
            dict.fromkeys(each if trained or each.parameters != "device" else DEVICE for each in open_placements)
        )
    frugal = [each for each in open_placements if each.on_one_tier] or open_placements
    return Decision(
        choices,
        lambda plan: {index: plan.buckets[index].placement for index in choices},
        with_placements,
        ordered=False,
        alike=_parts(space),
        frugal=[{index: each for index, own in choices.items() if each in own} for each in frugal],
    )


def recompute_options(space: SearchSpace) -> Decision:
    """How much of what each layer could save it saves: stops from nothing to all that the partitioner would save."""
    scheduler, rates = space.scheduler, space.scheduler.rates
    profile = scheduler.profile
    top = profile.all_saved
    seconds = {layer: [0.0] * (top + 1) for layer in profile.layers}
    size = {layer: [0] * (top + 1) for layer in profile.layers}
    for region in profile.regions:
        if region.layer in seconds:
            for option, work in enumerate(region.work):
                seconds[region.layer][option] += rates.compute(Cost.of(*(atom.cost for atom in work.atoms)))
    for life in profile.lives:
        layer = profile.regions[life.start].layer
        for option in life.saved if layer in size else ():
            size[layer][option] += life.bytes
    choices: dict[str, list[int]] = {}
    gains: dict[tuple[Item, int], float] = {}
    for layer, saved_sets in zip(profile.layers, profile.saved_sets, strict=True):
        found = choices[layer] = [0]
        for option in range(1, top + 1):
            if option < top and saved_sets[option - 1] in (frozenset(), *saved_sets[: option - 1]):
                continue  # the same as one before
            gain = seconds[layer][found[-1]] - seconds[layer][option]
            gains[layer, option] = gain / max(1, size[layer][option] - size[layer][found[-1]])
            found.append(option)

    def apply(plan: Plan, values: Values) -> Plan:
        changed = dict(zip(profile.layers, scheduler.options(plan), strict=True)) | values
        recompute, save = profile.recomputed([changed[layer] for layer in profile.layers])
        return replace(plan, recompute=recompute, save=save)

    best = {layer: max((gains[layer, option] for option in choices[layer][1:]), default=0.0) for layer in choices}
    return Decision(
        {layer: choices[layer] for layer in by_reward(list(choices), best.__getitem__)},
        lambda plan: dict(zip(profile.layers, scheduler.options(plan), strict=True)),
        apply,
        alike={layer: tuple(sizes) for layer, sizes in size.items()},
        gain=lambda item, option: gains.get((item, option), 0.0),
        frugal=[dict.fromkeys(choices, 0)],
    )


def offloaded_layers(space: SearchSpace, tiers: Sequence[Tier]) -> Decision:
    """Where all that a layer saves waits for the backward."""
    saved = _saved(space)

    def read(plan: Plan) -> dict[Item, Tier | None]:
        named = dict(plan.offload)
        return {
            layer: named.get(layer, None if any(name in named for name in names) else "device")
            for layer, names in saved.items()
        }

    def apply(plan: Plan, values: Values) -> Plan:
        tier_of = _tiers(saved, plan) | {name: tier for layer, tier in values.items() for name in saved[layer]}
        return replace(plan, offload=_named(saved, tier_of))

    sizes = dict.fromkeys(saved, 0)
    profile = space.scheduler.profile
    for life in profile.lives:
        layer = profile.regions[life.start].layer
        if layer in sizes and life.saved:
            sizes[layer] += life.bytes
    places = ("device", *tiers)
    frugal = [dict.fromkeys(saved, tier) for tier in places]
    return Decision(dict.fromkeys(saved, places), read, apply, ordered=False, alike=sizes, frugal=frugal)


def offloaded_activations(space: SearchSpace, tiers: Sequence[Tier]) -> Decision:
    """Where each saved activation waits for the backward, for steps of few."""
    saved = _saved(space)
    names = [name for own in saved.values() if len(own) > 1 for name in own]

    def apply(plan: Plan, values: Values) -> Plan:
        return replace(plan, offload=_named(saved, _tiers(saved, plan) | values))

    choices = dict.fromkeys(names if sum(map(len, saved.values())) <= MOST_SINGLE else (), ("device", *tiers))
    return Decision(choices, lambda plan: _tiers(saved, plan), apply, ordered=False)


def _saved(space: SearchSpace) -> dict[str, tuple[str, ...]]:
    """The activations that each layer may save; its own name where none has a name."""
    profile = space.scheduler.profile
    found: dict[str, dict[str, None]] = {layer: {} for layer in profile.layers}
    for life in profile.lives:
        layer = profile.regions[life.start].layer
        if life.activation and life.saved:
            found[layer][life.activation] = None
    return {layer: tuple(names) or (layer,) for layer, names in found.items()}


def _tiers(saved: Mapping[str, Sequence[str]], plan: Plan) -> Values:
    """Where every activation waits under ``plan``."""
    named = dict(plan.offload)
    return {name: named.get(name, named.get(layer, "device")) for layer, names in saved.items() for name in names}


def _named(saved: Mapping[str, Sequence[str]], tier_of: Mapping[Item, Tier]) -> tuple[tuple[str, Tier], ...]:
    """Where activations wait, as plans have it: by layer where all of it waits on one tier."""
    found: list[tuple[str, Tier]] = []
    for layer, names in saved.items():
        tiers = {tier_of[name] for name in names}
        together = [(layer, tier) for tier in tiers] if len(tiers) == 1 else [(name, tier_of[name]) for name in names]
        found += [(name, tier) for name, tier in together if tier != "device"]
    return tuple(found)


def with_starts(plan: Plan, ahead: Mapping[Item, int]) -> Plan:
    """``plan`` with buckets that are gathered so many intervals ahead, or as many as all where that is fewer."""
    return _with_buckets(plan, "ahead", {b: None if v >= plan.prefetch else v for b, v in ahead.items()})


def with_placements(plan: Plan, placements: Mapping[Item, Placement]) -> Plan:
    """``plan`` with buckets that live there; hosts keep nothing of parameters that come from another tier."""
    gone = (b for b, v in placements.items() if v.parameters != "device" and plan.buckets[b].residency == "host")
    return _with_buckets(_with_buckets(plan, "residency", dict.fromkeys(gone, "use")), "placement", placements)


def with_tiles(plan: Plan, tiles: Mapping[Item, int]) -> Plan:
    """``plan`` with buckets in so many tiles; what is in tiles is not kept."""
    residencies = {b: "use" for b, v in tiles.items() if v > 1 and plan.buckets[b].residency in ("host", "backward")}
    return _with_buckets(_with_buckets(plan, "residency", residencies), "tiles", tiles)


def _with_buckets(plan: Plan, field: str, values: Mapping[Any, Any]) -> Plan:
    buckets = list(plan.buckets)
    for index, value in values.items():
        if getattr(buckets[index], field) != value:
            buckets[index] = replace(buckets[index], **{field: value})
    return replace(plan, buckets=tuple(buckets)) if values else plan


def _parts(space: SearchSpace) -> dict[Item, object]:
    """By bucket what makes two interchangeable: bytes of everything that is moved of them."""
    parts = (space.scheduler.bucket_parts(b.index, 1)[0] for b in space.plan.buckets)
    return {index: (part.unsharded, part.shards) for index, part in enumerate(parts)}


# Orders ---------------------------------------------------------------------------------------------------------------


def in_runs(items: Sequence[T], groups: int) -> Iterator[Sequence[T]]:
    """``items`` in at most ``groups`` runs of about the same length."""
    count = min(groups, len(items))
    return (items[i * len(items) // count : (i + 1) * len(items) // count] for i in range(count))


def by_reward(items: Sequence[T], reward: Callable[[T], float]) -> list[T]:
    """The most rewarding first. Equally rewarding ones from the last, which are needed for the shortest time, then
    evenly spread, so that what is left over overlaps with what is not."""
    groups: dict[float, list[T]] = {}
    for item in items:
        groups.setdefault(float(f"{reward(item):.6g}"), []).append(item)  # what differs by rounding is alike
    return [item for value in sorted(groups, reverse=True) for item in spread(groups[value])]


def spread(items: Sequence[T]) -> list[T]:
    """The last, then those in the middle of the largest gaps (van der Corput's sequence)."""
    order = sorted(range(len(items)), key=lambda i: _reversed_bits(len(items) - 1 - i, len(items)))
    return [items[i] for i in order]


def _reversed_bits(number: int, count: int) -> int:
    width = max(1, (count - 1).bit_length())
    return int(f"{number:0{width}b}"[::-1], 2)


def _index(choices: Sequence[Any], value: Any) -> int:
    """Where ``value`` is among ``choices``, or the last before it: tiles may be of any number."""
    if value in choices:
        return choices.index(value)
    if value is None:  # activations of one layer that wait on several tiers
        return -1
    # Tiles fall from many to one; other choices rise.
    falling = len(choices) > 1 and choices[0] > choices[-1]
    return sum(bool(one > value) if falling else bool(one < value) for one in choices) - 1


def first(start: Plan, own: Sequence[Decision], *, least: bool) -> Iterator[Plan]:
    """The plan ``start`` of the rules, as far as it is open, and those that need the least of each tier."""
    for decision in own:
        now = decision.read(start)
        # Where a rule decided what is no choice here (the user fixed it otherwise), the first choice stands in.
        start = decision.apply(
            start, {item: open_[0] for item, open_ in decision.choices.items() if now[item] not in open_}
        )
    yield start
    for values in product(*(decision.frugal or ({},) for decision in own)) if least else ():
        plan = start
        for decision, frugal in zip(own, values, strict=True):
            plan = decision.apply(plan, frugal) if frugal else plan
        yield plan


def first_of(decisions_of: Mapping[SearchSpace, Sequence[Decision]]) -> Iterator[Candidate]:
    """The :func:`first` plans of each space; the smallest buckets of a variant come first, and need the least."""
    variants = set()
    for space, own in decisions_of.items():
        for plan in first(space.plan, own, least=variant_of(space.plan) not in variants):
            yield space.of(plan)
        variants.add(variant_of(space.plan))


def between(
    decisions_of: Mapping[SearchSpace, Sequence[Decision]], best: Callable[[], Sequence[Candidate]], rounds: int
) -> Iterator[Candidate]:
    """The plans :func:`halfway` between neighbours of a space among the ``best``, which grow from round to round."""
    for _ in range(rounds):
        found = best()
        for space, own in decisions_of.items():
            for a, b in pairwise(c for c in found if c.space is space):
                yield space.of(halfway(own, a.plan, b.plan))


def staying(space: SearchSpace, constraints: Constraints) -> list[Decision]:
    """The decisions of plans that leave everything on the device."""
    profile, rates = space.scheduler.profile, space.scheduler.rates
    found = []
    if profile.training and constraints.sharding == 3:
        found.append(_only(residency(space), "use" if constraints.stage == 3 else None))
    if profile.training and constraints.recompute in ("auto", "full") and profile.layers:
        full = constraints.recompute == "full" or (space.plan.token_tiles > 1 and not space.plan.by_sample)
        found.append(_only(recompute_options(space), 0 if full else None))
    prefetches = _prefetches(space, constraints)
    found.append(prefetch(prefetches))
    if rates.overlaps and prefetches[-1]:
        found.append(starts(space, prefetches[-1]))
    if profile.training and rates.overlaps and constraints.ranks > 1:
        found.append(of_step("reductions", UNDER_WAY))
    if profile.training and constraints.saved not in (None, "device"):
        found.append(of_step("fetch_ahead", FETCHES))
    return found


def _only(decision: Decision, choice: object) -> Decision:
    """``decision`` with one choice, unless that is None."""
    return decision if choice is None else replace(decision, choices=dict.fromkeys(decision.choices, (choice,)))


def all_decisions(
    space: SearchSpace, constraints: Constraints, open_placements: Sequence[Placement], tiers: Sequence[Tier]
) -> list[Decision]:
    """The decisions where something may leave the device, or be tiled."""
    found = staying(space, constraints)
    if constraints.tiles:
        found.append(tiles(space))
    if tiers and space.scheduler.profile.training:
        found.append(placements(space, open_placements))
        if constraints.activations:
            found += (offloaded_layers(space, tiers), offloaded_activations(space, tiers))
            found.append(of_step("fetch_ahead", FETCHES))
    return found


def _prefetches(space: SearchSpace, constraints: Constraints) -> tuple[int, ...]:
    if constraints.prefetch is not None:
        return (constraints.prefetch,)
    return PREFETCHES if space.scheduler.profile.training and space.plan.buckets else (DEFAULT_PREFETCH,)
