"""Rules that a plan must keep for the step that it is made for: a backend asks before anything of it is carried out.

They are the design's invariants that can be told from decisions alone, in milliseconds. Rules about the plan without a
step are part of ``zerograph check`` too, which goes on with the programs that a file carries
(:mod:`~zerograph.planner.explain.check_file`); gathers, frees and reductions of what is then compiled are looked at one
by one in its graphs (:mod:`zerograph.passes.verify`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields

from zerograph.core.errors import InvariantError
from zerograph.core.plan import Plan
from zerograph.core.step import Param, Step, layer_of, layer_of_activation
from zerograph.planner.profile.liveness import Graph
from zerograph.planner.profile.loss import head_of
from zerograph.planner.profile.token_tiles import regions_of, to_be_whole
from zerograph.sim.check_step import Wrong

BEFORE = -1
"""The task that stands for the start of the step."""
_SHOWN = 5
"""Violations that an error names; more are counted."""


def check_plan(step: Step, plan: Plan) -> list[Wrong]:
    """Everything that is wrong with ``plan`` as one for ``step``; empty when nothing is."""
    step = step.over(max(1, plan.world_size))  # the number of ranks is the plan's to say, and may make no sense
    return [wrong for _, finder in CHECKS.values() for wrong in finder(step, plan)]


def require_plan(step: Step, plan: Plan, hint: str) -> None:
    """Refuse a plan that does not fit ``step``.

    Raises:
        InvariantError: naming the operation, the parameter or module and the user's source line; ends with ``hint``.
    """
    wrong = check_plan(step, plan)
    if not wrong:
        return
    lines = [f"  {each.check}: {each.message}{_where(step, each)}" for each in wrong[:_SHOWN]]
    if len(wrong) > _SHOWN:
        lines.append(f"  and {len(wrong) - _SHOWN} more")
    raise InvariantError(f"the plan {plan.digest} cannot be carried out:\n" + "\n".join(lines), hint)


def _where(step: Step, wrong: Wrong) -> str:
    operation = f"operation {step.ops[wrong.task].name}" if wrong.task != BEFORE else ""
    known = [text for text in (operation, wrong.module, wrong.source) if text]
    return f" (at {', '.join(known)})" if known else ""


def sense(plan: Plan) -> Iterator[Wrong]:
    """The plan says nothing that no plan may say."""
    return (Wrong("plan", text) for text in plan.mistakes())


def buckets(plan: Plan) -> Iterator[Wrong]:
    """Every parameter is in exactly one bucket."""
    owner: dict[str, str] = {}
    for place, bucket in enumerate(plan.buckets):
        if bucket.index != place:
            yield Wrong("buckets", f"bucket {bucket.name} has index {bucket.index} in place {place}", bucket.name)
        if not bucket.params:
            yield Wrong("buckets", f"bucket {bucket.name} is empty", bucket.name)
        for param in bucket.params:
            if param.name in owner:
                yield Wrong("buckets", f"{param.name} is in buckets {owner[param.name]} and {bucket.name}", param.name)
            owner.setdefault(param.name, bucket.name)


def differences(planned: Iterable[Param], here: Iterable[Param]) -> Iterator[Wrong]:
    """The parameters of a plan that are not those of a step, and what differs."""
    before, now = ({param.name: param for param in params} for params in (planned, here))
    for name in {**before, **now}:
        if name not in now:
            yield Wrong("parameters", f"parameter {name} is in the plan, and the model does not read it", name)
        elif name not in before:
            yield Wrong("parameters", f"parameter {name} is not in the plan", name)
        elif before[name] != now[name]:
            text = f"parameter {name}: {'; '.join(_fields(before[name], now[name]))}"
            yield Wrong("parameters", text, name)


def _fields(planned: Param, here: Param) -> Iterator[str]:
    for each in fields(Param):
        before, now = getattr(planned, each.name), getattr(here, each.name)
        if before != now:
            text = _LABELS.get(each.name, each.name.replace("_", " "))
            yield f"{text} {before} in the plan, {now} here"


_LABELS = {"home": "layout", "reduce_dtype": "dtype of the reduction", "tied_to": "other names"}
"""Fields of a parameter whose names are not those that people use."""


def _parameters(step: Step, plan: Plan) -> Iterator[Wrong]:
    return differences((param for bucket in plan.buckets for param in bucket.params), step.params)


def _layers(step: Step, plan: Plan) -> Iterator[Wrong]:
    named = dict.fromkeys((name for name, _ in plan.offload), "leaves the device")
    named |= dict.fromkeys(plan.save, "is saved") | dict.fromkeys(plan.recompute, "is recomputed")
    there = {layer_of(op.module) for op in step.ops} if named else set()
    if any(map(layer_of_activation, named)):
        there.update(op.activation for op in step.ops)
    for name, what in named.items():
        if name not in there:
            kind = "activation" if layer_of_activation(name) else "layer"
            yield Wrong("layers", f"{name} {what} in the plan, and the step has no such {kind}", name)


def _loss(step: Step, plan: Plan) -> Iterator[Wrong]:
    head = head_of(Graph.of(step)) if plan.loss_tiles > 1 else None
    if plan.loss_tiles > 1 and (head is None or head.activation != plan.head):
        yield Wrong("loss", f"the loss is in {plan.loss_tiles} tiles, and the step has none behind logits of its own")


def _token_regions(step: Step, plan: Plan) -> Iterator[Wrong]:
    by_token = {region.activation: region for region in regions_of(step, plan.by_sample)}
    whole = to_be_whole(plan, plan.by_sample)
    for name in plan.token_regions:
        if name not in by_token:
            yield Wrong("tokens", f"{name} is in {plan.token_tiles} tiles of tokens, and needs all at once", name)
        elif not whole.isdisjoint(by_token[name].params):
            yield Wrong(
                "tokens", f"{name} is in tiles of tokens, and a weight that each of them moves is in tiles", name
            )


def _reads(step: Step, plan: Plan) -> Iterator[Wrong]:
    written = {name for op in step.ops for name in op.writes}
    there = {value.name for value in step.values if value.name not in written}  # inputs
    for place, op in enumerate(step.ops):
        if not there.issuperset(op.reads):
            for name in (name for name in op.reads if name not in there):
                when = "before it is made" if name in written else "which is neither an input nor made"
                yield Wrong("reads", f"{op.name} reads {name}, {when}", op.module, op.source, place)
        if not there.isdisjoint(op.writes):
            text = f"{op.name} makes {', '.join(there.intersection(op.writes))}, which is there"
            yield Wrong("reads", text, op.module, op.source, place)
        there.update(op.writes)


def _reductions(step: Step, plan: Plan) -> Iterator[Wrong]:
    gradients = _gradients(step)
    done = Counter(name for op in step.ops if not gradients.isdisjoint(op.writes) for name in op.params)
    for name, wanted in _trained(step, done):
        if done[name] != wanted:
            yield Wrong("reductions", f"the gradient of {name} is reduced {done[name]} times, not {wanted}", name)


def _gradients(step: Step) -> set[str]:
    return {value.name for value in step.values if value.kind == "gradient"}


def _trained(step: Step, done: Counter[str]) -> Iterator[tuple[str, int]]:
    """Every parameter that the step has, or does something with, and how often that is to be done."""
    trained = {p.name for p in step.params if p.trainable and step.training}
    names = dict.fromkeys((*(p.name for p in step.params), *done))
    return ((name, 1 if name in trained else 0) for name in names)


PlanCheck = Callable[[Step, Plan], Iterator[Wrong]]


def _of_plan(finder: Callable[[Plan], Iterator[Wrong]]) -> PlanCheck:
    return lambda step, plan: finder(plan)


PLAN_CHECKS: Mapping[str, tuple[str, Callable[[Plan], Iterator[Wrong]]]] = {
    "plan": ("placements, tiles and stage of the plan go together", sense),
    "buckets": ("every parameter is in exactly one bucket", buckets),
}
"""The checks that need no step."""

CHECKS: Mapping[str, tuple[str, PlanCheck]] = {
    **{name: (text, _of_plan(finder)) for name, (text, finder) in PLAN_CHECKS.items()},
    "parameters": ("the plan is about the very parameters of the step", _parameters),
    "layers": ("layers that are recomputed or offloaded exist", _layers),
    "loss": ("a loss that is tiled is the model's own, behind its logits", _loss),
    "tokens": ("layers in tiles of tokens can run so, with their weights at hand", _token_regions),
    "reads": ("every value is made once, before it is read", _reads),
    "reductions": ("every gradient is reduced once", _reductions),
}
"""Name of a check, what it makes sure of, and what finds the violations."""
