"""How a traced frame becomes programs: the whole compiler, from top to bottom.

    Dynamo graph -> joint graph          AOTAutograd, with Inductor's decompositions
    joint        -> Step -> Plan         capture, planner
    joint        -> forward, backward    passes, Inductor's passes, the minimum cut
    each         -> Program -> Executor  passes, lower, runtime

:data:`~zerograph.passes.PIPELINE` lists the passes by stage; :func:`~zerograph.compiler.rewrite.rewrite` runs those of
the stages that it is given. A dry run goes the same way and ends with the programs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx, nn

from zerograph.compiler.capture import capture
from zerograph.compiler.frame import Frame
from zerograph.compiler.frame_cache import FrameFile
from zerograph.compiler.frame_plan import Planner, plain
from zerograph.compiler.loss_only import return_loss_only
from zerograph.compiler.lowering.lower import lower, returned_names
from zerograph.compiler.lowering.own_groups import use_own_groups
from zerograph.compiler.lowering.segments import Callee
from zerograph.compiler.parameter_mutations import refuse_mutations
from zerograph.compiler.repetition.repeat import Joint
from zerograph.compiler.repetition.shorten import few_layers, joint_of, tracing_few
from zerograph.compiler.rewrite import rewrite
from zerograph.compiler.shard_inputs import take_local_shards
from zerograph.compiler.tileable import left_in_tiles
from zerograph.compiler.torch_private import (
    as_when_called,
    ends_at_graph_break,
    keep_saved_tensors,
    never_constant_fold,
    simplify_joint,
    split_by_minimum_cut,
    trace_and_split,
)
from zerograph.compiler.unsharded_parameters import compute_with_unsharded, explaining_mixtures
from zerograph.core.garbage import without_gc
from zerograph.graph.layers import name_model
from zerograph.graph.nodes import Pair
from zerograph.graph.ops import REDUCE_GRAD
from zerograph.passes import Kind
from zerograph.planner.explain.replay import restricted_to_step
from zerograph.runtime.executor.executor import Executor

log = logging.getLogger(__name__)
never_constant_fold(REDUCE_GRAD)  # a gradient that is the same everywhere is reduced like any other


def compile_frame(frame: Frame, gm: fx.GraphModule, inputs: Sequence[Any], planner: Planner) -> Callable[..., Any]:
    """Compile one Dynamo graph, which reads sharded parameters through markers; returns what Dynamo calls.

    A result that an earlier process stored for the same graph is loaded instead.
    """
    made = frame.compilation
    rows, exchanging = _checked(frame, gm, inputs)
    with without_gc():
        entry = FrameFile.of(planner, frame, gm, rows)
        with made.segments.kernels_in_background():
            compiled = entry.load(frame)
            if compiled is None:
                with entry.noting(), explaining_mixtures(gm, inputs):
                    compiled = _compile(frame, gm, rows)
        if made.agreement is not None:  # not before every kernel exists: a rank that fails has promised nothing
            for program in frame.programs.values():
                made.agreement.check(frame.code, program)
        entry.store(frame)
    return exchanging(compiled)


def _compile(frame: Frame, gm: fx.GraphModule, rows: Sequence[Any]) -> Callable[..., Any]:
    with tracing_few(frame, gm, rows):
        return trace_and_split(
            gm,
            rows,
            forward=partial(_executor, frame, "forward"),
            backward=partial(_executor, frame, "backward"),
            inference=partial(_inference, frame),
            partition=partial(split, frame),
        )


def split(
    frame: Frame,
    joint: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] = (),
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Plan the step, then split the joint graph so that shards are saved and parameters gathered again."""
    _plan_and_prepare(frame, "joint", joint)
    rewrite(frame, "joint", joint, "joint")
    forward, backward = split_by_minimum_cut(joint, inputs, num_fwd_outputs, static_lifetime_input_indices)
    rewrite(frame, "forward", Pair(forward, backward, num_fwd_outputs), "pair")
    return forward, backward


def _plan_and_prepare(frame: Frame, kind: str, gm: fx.GraphModule) -> None:
    """Plan the step that ``gm`` is, and prepare that for being split: Inductor's passes, and those behind a plan."""
    _plan(frame, kind, gm)
    made = frame.compilation
    simplify_joint(gm)
    left = left_in_tiles(frame.step, frame.plan, gm.graph)
    if left is not frame.step:
        frame.step, frame.plan = left, restricted_to_step(frame.plan, left)
    # Not before the plan: the cache of gathered buckets follows its residencies.
    if made.runtime_for is not None:
        frame.runtime = made.runtime_for(frame.index, frame.code, frame.plan)
    rewrite(frame, kind, gm, "planned")


def _plan(frame: Frame, kind: str, gm: fx.GraphModule) -> None:
    made = frame.compilation
    rewrite(frame, kind, gm, "traced")
    frame.step = capture(
        gm.graph,
        training=kind == "joint",
        world_size=made.world_size,
        tied=made.tied,
        ends_at_break=frame.ends_at_break,
        cut_by=made.cut_by,
        wires=made.wires,
    )
    frame.plan = made.plan_for(frame.code, frame.step, frame.plain)


def to_program(frame: Frame, kind: Kind, gm: fx.GraphModule) -> tuple[Callee, ...]:
    """Make the frame's program of that kind; returns the callables of its segments."""
    start = time.perf_counter()
    returned = returned_names(gm) if kind == "forward" else ()
    rewrite(frame, kind, gm, kind, "graph")
    made = frame.compilation
    use_own_groups(gm.graph, made.groups)
    program, segments = lower(gm, kind, made.segments, frame.plan, made.staging, returned)
    frame.programs[kind] = program
    frame.seconds += time.perf_counter() - start
    log.debug("frame %d %s:\n%s", frame.index, kind, program)
    return segments


def _inference(frame: Frame, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    _plan_and_prepare(frame, "inference", gm)
    return _executor(frame, "inference", gm, inputs)


def _executor(frame: Frame, kind: Kind, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    assert frame.runtime is not None
    segments = to_program(frame, kind, gm)
    if kind == "backward":
        keep_saved_tensors()
    return Executor(frame.programs[kind], segments, frame.runtime)


def trace(frame: Frame, gm: fx.GraphModule, inputs: Sequence[Any]) -> Joint | None:
    """The joint graph of one Dynamo graph, where nobody will call it; None where it has no backward."""
    rows, _ = _checked(frame, gm, inputs)
    with without_gc():
        few = few_layers(gm, rows) if frame.compilation.repeats_layers else None
        return few if few is not None else joint_of(gm, rows)


def compile_joint(frame: Frame, joint: Joint) -> dict[Kind, tuple[Callee, ...]]:
    """Make the programs of a joint graph that :func:`trace` gave; returns the callables of their segments by kind."""
    with without_gc(), as_when_called(joint.gm):
        graphs = split(frame, joint.gm, (), num_fwd_outputs=joint.outputs, static_lifetime_input_indices=joint.static)
        return {kind: to_program(frame, kind, gm) for kind, gm in zip(_TRAINING, graphs, strict=True)}


_TRAINING: tuple[Kind, ...] = ("forward", "backward")


def plan_joint(frame: Frame, joint: Joint) -> None:
    """Plan the step of a joint graph that :func:`trace` gave, and make no programs of it."""
    with without_gc(), as_when_called(joint.gm):
        _plan(frame, "joint", joint.gm)


def _checked(
    frame: Frame, gm: fx.GraphModule, inputs: Sequence[Any]
) -> tuple[list[Any], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Refuse what cannot be compiled; returns the inputs to trace with, and how a compiled function gets them."""
    compute_with_unsharded(gm, inputs)
    refuse_mutations(gm)
    name_model(gm)
    frame.plain = plain(value for value in inputs if isinstance(value, nn.Parameter))
    frame.ends_at_break = ends_at_graph_break(gm)
    restore = return_loss_only(gm) if frame.compilation.loss_only else None
    rows, exchanging = take_local_shards(gm, inputs)
    return rows, exchanging if restore is None else lambda compiled: restore(exchanging(compiled))
