"""Why no plan of a step fits: which tier is short, when, what is held then, and which change would help how much.

The error describes the plan that overruns its tiers by the smallest share. For every change only those plans are
simulated that need the least. A search for the change looks at these too, so "then it fits" is true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zerograph.core.errors import InfeasibleError
from zerograph.core.executable import tiers_run
from zerograph.core.files.planfile import Holding
from zerograph.core.garbage import without_gc
from zerograph.core.layout import Layout, split_dimension
from zerograph.core.machine import TIERS, Machine, Tier
from zerograph.core.param_bytes import state_bytes
from zerograph.core.plan import OFFLOADS, Offload
from zerograph.core.step import KIND_NAMES, Step
from zerograph.core.timeline import Peak, Span
from zerograph.core.units import format_bytes
from zerograph.planner.estimate.shortage import Remedy, ranked
from zerograph.planner.profile.liveness import Graph
from zerograph.planner.profile.regions import Profile, Work
from zerograph.planner.programs.forecasts import forecast_plan
from zerograph.planner.search.constraints import Constraints
from zerograph.planner.search.decisions import all_decisions, first
from zerograph.planner.search.search import Search
from zerograph.planner.search.search_space import Candidate, limits, overrun
from zerograph.planner.search.variants import BUCKET_SIZES, Variant, same_variants, spaces_of, variants_of

Budget = int | Mapping[Tier, int]


@dataclass(frozen=True, slots=True)
class Change:
    """One thing done otherwise, and what a search is then asked.

    Attributes:
        text: for people.
        step, constraints, budget: what is then searched.
        states: bytes on the device between steps.
        variants: of ``step``, where they are known.
    """

    text: str
    step: Step
    constraints: Constraints
    budget: Budget
    states: int
    variants: Sequence[Variant] = ()

    def smallest(self, machine: Machine, moments: int) -> list[Candidate]:
        """Those plans of a search that need the least of each tier, at a small part of its cost: of these one overruns
        the budget the least."""
        size = self.constraints.bucket_size
        # The smallest buckets need the least: fewer bytes are unsharded at a time.
        constraints = replace(self.constraints, bucket_size=BUCKET_SIZES[0] if size is None else size)
        with without_gc():
            return [
                space.of(plan)
                for variant in self.variants or variants_of(Graph.of(self.step), constraints, machine)
                for one in constraints.with_updates(machine)
                for tiers in [one.tiers(machine)]
                for space in spaces_of(self.step, one, machine, self.states, moments, variant)
                for plan in first(space.plan, all_decisions(space, one, one.placements(tiers), tiers), least=True)
            ]


def infeasible(search: Search, step: Step, machine: Machine, budget: Budget) -> InfeasibleError:
    """The error for a ``search`` of ``step`` that found nothing within ``budget`` bytes, of the device or per tier."""
    closest, most = search.closest(budget), limits(budget)
    short = TIERS.index(overrun(closest.peaks, most)[2])
    found = [
        _turn(change, search, machine, closest.peaks[short], short) for change in changes(search, step, machine, budget)
    ]
    lines = [str(remedy) for remedy in ranked(found)]
    offloads = any(other.offload != "none" for _, other in _placements(search.constraints, machine))
    if offloads and _keeps_its_own(step, search.constraints):
        lines.append('offload="auto", which takes a trace of its own (zerograph plan --offload auto)')
    tiers = [short, *(i for i, peak in enumerate(closest.peaks) if peak > most[i] and i != short)]
    lines.append(" and ".join(_more(TIERS[i], closest.peaks[i] - most[i]) for i in tiers))
    needs = ", and ".join(_need(search, closest, i, most[i]) for i in tiers)
    return InfeasibleError(
        f"the step needs {needs}, the reserve taken off\n{_moment(closest, TIERS[short])}",
        "what would help: " + "; ".join(lines),
    )


def _need(search: Search, closest: Candidate, tier: int, have: int) -> str:
    need = closest.peaks[tier]
    least = " at least" if need == min(c.peaks[tier] for c in search.best) else ""
    return f"{format_bytes(need)} of {TIERS[tier]} memory per rank{least} and may use {format_bytes(have)}"


def _more(tier: Tier, size: int) -> str:
    return f"{format_bytes(size)} more {'' if tier == 'device' else f'{tier} '}memory"


def _moment(found: Candidate, tier: Tier) -> str:
    """The moment at which ``tier`` holds the most, and what takes most of it."""
    # Registers of the search have names of whichever variant made them.
    forecast, holdings = forecast_plan(found.space.scheduler.fresh(), found.plan)
    peak = forecast.peaks[tier]
    during, at = forecast.computing(peak), 0.0 if peak.task < 0 else forecast.spans[peak.task].start
    there = [h for h in holdings if h.tier == tier and h.held_at(at, forecast.spans)]
    kinds = Counter[str]()
    for holding in there:
        kinds[KIND_NAMES[holding.kind]] += holding.bytes
    if tier == "device":
        rest = found.held - sum(h.bytes for h in there if h.first == h.last == -1)
        kinds["shards and optimizer states that this graph does not move"] = rest
    parts = ", ".join(f"{format_bytes(size)} of {what}" for what, size in kinds.most_common() if size > 0)
    largest = max(there, key=lambda h: h.bytes, default=None)
    more = f"; the largest is {largest.name} with {format_bytes(largest.bytes)}{_at(largest)}" if largest else ""
    return f"most is held in {during.name}{_at(during)}: {parts}{more}"


def _at(one: Holding | Peak | Span) -> str:
    return f" ({one.source})" if one.source else ""


def _turn(change: Change, search: Search, machine: Machine, need: int, short: int) -> Remedy:
    """The remedy of ``change``: the bytes that it takes off the ``need`` of the tier ``short``."""
    found, most = change.smallest(machine, search.moments), limits(change.budget)
    after = min(found, key=lambda c: (overrun(c.peaks, most)[0], c.rank))
    return Remedy(change.text, need - after.peaks[short], any(c.fits(most) for c in found))


def changes(search: Search, step: Step, machine: Machine, budget: Budget) -> Iterator[Change]:
    """Every single change of what the user fixed, of the batch, and of the world."""
    constraints, states = search.constraints, search.states
    step = step.over(constraints.world_size)
    movable = step.movable(constraints.world_size)
    for text, changed in (*_fixed(constraints), *_placements(constraints, machine)):
        leaves = changed.offload != "none"
        if leaves and _keeps_its_own(step, constraints):
            continue  # no parameter of the step is there that could leave
        known = search.variants if same_variants(changed, constraints) else ()
        yield Change(text, movable if leaves else step, changed, budget, states, known)
    if constraints.stage == 0 and constraints.world_size > 1:
        yield _sharded(search, step, budget)
    elif constraints.stage != 0:
        yield _wider(search, step, machine, budget)
    halved = [variant._replace(profile=_halved(variant.profile)) for variant in search.variants]
    yield Change("half the batch, if activations shrink with it", step, constraints, budget, states, halved)


def _keeps_its_own(step: Step, constraints: Constraints) -> bool:
    """Whether one rank's parameters are the user's own, in no graph that could move them."""
    return constraints.world_size == 1 and not step.params


def _fixed(constraints: Constraints) -> Iterator[tuple[str, Constraints]]:
    if constraints.recompute not in ("auto", "full"):
        yield 'recompute="full"', replace(constraints, recompute="full")
    if constraints.stage in (1, 2):
        yield 'stage="auto"', replace(constraints, stage="auto")
    if constraints.bucket_size is not None and constraints.bucket_size > BUCKET_SIZES[0]:
        size = BUCKET_SIZES[0]
        yield f'bucket_size="{format_bytes(size).replace(" ", "")}"', replace(constraints, bucket_size=size)
    if constraints.prefetch:
        yield "prefetch=0", replace(constraints, prefetch=0)


def _sharded(search: Search, step: Step, budget: Budget) -> Change:
    """A stage that shards, for a step that was traced with whole parameters."""
    constraints = replace(search.constraints, stage="auto")
    ranks = constraints.world_size
    homes = (p.home.ranks for p in step.over(ranks).params)
    laid = [
        Layout.home(own, sharded=split_dimension(p.shape, own) is not None)
        for p, own in zip(step.params, homes, strict=True)
    ]
    params = tuple(replace(p, home=home) for p, home in zip(step.params, laid, strict=True))
    states = search.states + sum(state_bytes(params, search.moments))
    states -= sum(state_bytes(step.params, search.moments))
    return Change('stage="auto"', replace(step, params=params), constraints, budget, states)


def _wider(search: Search, step: Step, machine: Machine, budget: Budget) -> Change:
    """Twice the ranks, which share a host where there is room for them on one."""
    old = search.constraints.world_size
    new = 2 * old
    rest = search.states - sum(state_bytes(step.params, search.moments))
    if not step.params:
        rest //= 2  # all of it is of parameters that other graphs read, most of which are sharded
    wider = step.over(new)
    states = rest + sum(state_bytes(wider.params, search.moments))
    if not isinstance(budget, int):
        # More ranks on one host have less of its memory and NVMe each.
        before, behind = (machine.budget(ranks * search.constraints.replicas) for ranks in (old, new))
        budget = {t: b * behind[t] // max(1, before[t]) for t, b in budget.items()}
    return Change(
        f"world size {new}", wider, replace(search.constraints, world_size=new), budget, states, search.variants
    )


def _halved(known: Profile) -> Profile:
    """The same step with half the activations and temporaries, and half the work; parameters stay."""
    regions = tuple(replace(region, work=tuple(map(_half, region.work))) for region in known.regions)
    lives = tuple(
        replace(
            life,
            bytes=-(-life.bytes // 2),
            made=-(-life.made // 2),
            members=tuple((value, size // 2) for value, size in life.members),
        )
        for life in known.lives
    )
    return replace(known, regions=regions, lives=lives)


def _half(work: Work) -> Work:
    atoms = tuple(replace(atom, cost=atom.cost.of_share(2)) for atom in work.atoms)
    # Full gradients stay as large as they are.
    stays = sum(size for atom in work.atoms for _, size in atom.gradients)
    levels = tuple(min(level, -(-(level + stays) // 2)) for level in work.memory.levels)
    return Work(atoms, replace(work.memory, levels=levels))


def _placements(constraints: Constraints, machine: Machine) -> Iterator[tuple[str, Constraints]]:
    """Every other offload, to each tier that backends of the machine run, and tiles."""
    if constraints.offload == "none" and not constraints.tiles and constraints.sharding == 3:
        yield "tile= for large linear layers", replace(constraints, tile=True)
    if constraints.executable is not None and constraints.saved is None and constraints.offload != "auto":
        for tier in constraints.executable:
            if machine.capacity(tier, constraints.ranks):
                yield f'activations="{tier}"', replace(constraints, saved=tier)
    if constraints.executable is not None and isinstance(constraints.loss, int):
        yield 'loss_tiles="auto"', replace(constraints, loss="auto")
    if (
        constraints.executable is not None
        and isinstance(constraints.tokens, int)
        and constraints.recompute in ("auto", "full")
    ):
        yield 'token_tiles="auto"', replace(constraints, tokens="auto")
    if constraints.offload == "auto":
        if constraints.executable is None and constraints.tier is not None:
            yield "offload to any tier", replace(constraints, tier=None)
        return
    kinds: list[Offload] = [kind for level, kind in enumerate(OFFLOADS) if 0 < level <= constraints.sharding]
    for tier in tiers_run(machine):
        # A folder that is not given yet may be given.
        runs = None if constraints.executable is None else (*constraints.executable, tier)
        for kind in kinds if machine.capacity(tier, constraints.ranks) else ():
            if (kind, tier) != (constraints.offload, constraints.tier) and not (
                constraints.offload == kind and constraints.tier is None
            ):
                other = replace(constraints, offload=kind, tier=tier, executable=runs)
                yield f'offload="{kind}", tier="{tier}"', other
