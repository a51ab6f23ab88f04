"""The optimizer's update as the last operations of a step: one per trainable parameter.

These say what an update reads and writes, and come from the rule (:func:`~zerograph.core.param_bytes.update_bytes`)
that tasks of a forecast are timed by, so that the two agree. The planner makes those tasks from a plan's parameters and
not from these operations: where states live, on how many ranks and in which tiles is what it decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zerograph.core.param_bytes import shard_bytes, update_bytes
from zerograph.core.step import Op, Param, Step, Value


def with_updates(step: Step, moments: int) -> Step:
    """``step`` followed by the update of every parameter that it trains; an evaluation trains none.

    Args:
        moments: tensors that the optimizer keeps per parameter.
    """
    if not step.training:
        return step
    kinds = {value.name: value for value in step.values}
    shards: dict[str, str] = {}  # parameter -> the value that it is gathered from
    gradients: dict[str, list[str]] = {}  # parameter -> its reduced gradient
    for op in step.ops:
        kind = kinds[op.writes[0]].kind
        if kind == "gathered" and op.reads:
            # The marker may read a view of the shard; the update writes the shard itself.
            shards[op.params[0]] = kinds[op.reads[0]].alias_of or op.reads[0]
        elif kind == "gradient":
            gradients.setdefault(op.params[0], []).append(op.writes[0])
    values = {name: replace(kinds[name], kind="param") for name in shards.values()}
    ops, made = [], [values.get(value.name, value) for value in step.values]
    for param in (p for p in step.params if p.trainable):
        size, shard = shard_bytes(param), shards.get(param.name, "")
        state_size = size * moments
        states, written = list(_states(param, state_size)), [Value(f"updated {param.name}", size, "param", shard)]
        written += [Value(f"updated {s.name}", s.bytes, "state", s.name) for s in states]
        reads = (*([shard] if shard else []), *gradients.get(param.name, ()), *(s.name for s in states))
        made += [*states, *written]
        ops.append(_update(param, reads, tuple(v.name for v in written), update_bytes(param, state_size)))
    return replace(step, ops=(*step.ops, *ops), values=tuple(made))


def _states(param: Param, size: int) -> Iterator[Value]:
    if size:
        yield Value(f"states of {param.name}", size, "state")


def _update(param: Param, reads: tuple[str, ...], writes: tuple[str, ...], moved: int) -> Op:
    module = param.name.rpartition(".")[0]
    return Op(f"update {param.name}", "optimizer", "update", reads, writes, (param.name,), "", module, 0, moved)
