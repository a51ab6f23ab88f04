"""How a traced frame becomes programs: the whole compiler on one screen.

    Dynamo graph -> of plain tensors     rows
                 -> joint graph          AOTAutograd, with Inductor's decompositions
    joint        -> Step -> Plan         capture, planner
    joint        -> forward, backward    canonicalize, name_activations, localize, recompute, min-cut partition, hoist,
                                         order_saved
    each         -> zg:: instructions    gather, prefetch, reduce, verify
    each         -> Program -> Executor  lower, runtime

What each step does is told where it lives, named on the right.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode
from torch._inductor.constant_folding import add_dont_constant_fold
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from zerograph import passes
from zerograph.compiler.capture import Setting, capture, capture_symbolic
from zerograph.compiler.fold import fold, joint_of, tracing_gives
from zerograph.compiler.lower import lower, without_code
from zerograph.compiler.shard_inputs import take_rows
from zerograph.compiler.unfold import Joint, NotFoldable, Repeat
from zerograph.core.garbage import uncollected
from zerograph.dryrun.compile_only import Captured, DryRun
from zerograph.frame import Frame
from zerograph.graph.layers import name_model
from zerograph.graph.ops import REDUCE_GRAD
from zerograph.runtime.executor import Executor
from zerograph.speedups import fast_minimum_cut, graphs_written_for_readers

if TYPE_CHECKING:
    from zerograph.api import Backend

log = logging.getLogger(__name__)

MOST_NODES = 5000
"""Of a joint graph that is kept as text, to show what passes did to it: a deep one is long, and repeats itself."""


add_dont_constant_fold(REDUCE_GRAD)  # a gradient that is the same everywhere is reduced like any other


def compile_frame(backend: Backend, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile one Dynamo graph whose parameters have their faces; returns what Dynamo calls."""
    frame = backend.new_frame()
    name_model(gm)
    compiler = aot_autograd(
        fw_compiler=partial(_compile_graph, frame, "forward"),
        bw_compiler=partial(_compile_graph, frame, "backward"),
        inference_compiler=partial(_compile_inference, frame),
        partition_fn=partial(_partition, frame),
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,
    )
    # The backward compiles with the forward on every rank. By default that depends on whether shapes are dynamic, which
    # may differ between ranks: one that asks the others about its backward would wait for ranks that run already.
    traced, exchanging = take_rows(gm, example_inputs)
    with (
        uncollected(),
        graphs_written_for_readers(),
        functorch_config.patch(unlift_effect_tokens=True, force_non_lazy_backward_lowering=True),
        _use_lazy_graph_module(True),  # nobody calls the graphs between here and the programs: no Python for them
        frame.backend.segments.kernels_in_background(frame.backend.device),
        _few_layers_traced(frame, gm, traced),
    ):
        compiled = compiler(gm, traced)
    frame.backend.compiled(frame)  # not before every kernel exists: a rank that fails has promised nothing
    return exchanging(compiled)


@contextmanager
def _few_layers_traced(frame: Frame, gm: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """Inside, AOTAutograd has the trace of ``gm`` from that of four of its layers, where they are alike."""
    backend = frame.backend
    if not backend.folds or backend.unfolding is not None or not torch.is_grad_enabled():
        yield  # that dry run has few layers as it is
        return
    try:
        folded = fold(gm)
        frame.repeat = folded.repeated(joint_of(folded.gm, [inputs[i] for i in folded.inputs]))
    except NotFoldable as reason:
        log.debug("frame %d: tracing all layers: %s", frame.index, reason)
        yield
        return
    log.debug("frame %d: %s: traced %d of %d layers", frame.index, folded.path, len(folded.traced), len(folded.layers))
    try:
        with tracing_gives(frame.repeat.whole.gm):
            yield
    finally:
        frame.repeat = None  # it holds graphs, and is of no use any more


def _partition(
    frame: Frame,
    joint: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] = (),
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Plan the step, then split the joint graph so that shards are saved and parameters gathered again."""
    static = list(static_lifetime_input_indices)
    dry = frame.backend.unfolding
    if dry is not None:
        frame.repeat = dry(Joint(joint, num_fwd_outputs, static))
        joint, static = frame.repeat.whole.gm, frame.repeat.whole.static
    joint = _prepare(frame, joint, inputs, training=True)
    frame.passed("joint", "recompute", passes.recompute(joint, frame.plan), "", joint)  # it tags: the text stays
    with fast_minimum_cut():
        forward, backward = min_cut_rematerialization_partition(
            joint,
            inputs,
            compiler="inductor",
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static,
        )
    text = frame.text_of(forward, MOST_NODES)
    text = frame.passed("forward", "hoist", passes.hoist(forward), text, forward)
    frame.passed("forward", "order_saved", passes.order_saved(forward, backward, num_fwd_outputs), text, forward)
    if dry is not None:  # AOTAutograd knows the layers that were traced, and would miss the others' inputs
        _compile_graph(frame, "forward", forward, inputs)
        _compile_graph(frame, "backward", backward, inputs)
        raise DryRun
    return forward, backward


def _compile_inference(frame: Frame, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return _compile_graph(frame, "inference", _prepare(frame, gm, inputs, training=False), inputs)


def _prepare(frame: Frame, gm: fx.GraphModule, inputs: Sequence[Any], *, training: bool) -> fx.GraphModule:
    """Plan the step that ``gm`` is; returns the graph to go on with."""
    repeat = frame.repeat if frame.repeat is not None and frame.repeat.whole.gm is gm else None
    kind, text = "joint" if training else "inference", frame.text_of(gm, MOST_NODES)
    text = frame.passed(kind, "canonicalize", passes.canonicalize(gm), text, gm)
    frame.passed(kind, "name_activations", passes.name_activations(gm), "", gm)  # it tags: the text stays
    sizes, backend = frame.backend.open_sizes, frame.backend
    setting = Setting(training, backend.world_size, backend.planner.moments, backend.tied)
    if sizes is not None:
        found = capture_symbolic(gm.graph, sizes, setting)
        raise Captured(found, frame.backend.planner.states(found.traced))
    step = capture(gm.graph, setting)
    frame.planned(step, frame.backend.planner.plan(frame, step))
    frame.passed(kind, "localize", passes.localize(gm), text, gm)
    with V.set_fake_mode(detect_fake_mode(inputs)):  # where Inductor's passes look for it
        if repeat is not None:
            try:
                return _simplified_once(repeat)
            except NotFoldable as reason:  # random operators are numbered through all layers
                log.debug("frame %d: simplifying all layers: %s", frame.index, reason)
        joint_graph_passes(gm)
    return gm


def _simplified_once(repeat: Repeat) -> fx.GraphModule:
    """The joint graph after our passes and Inductor's, which look at the traced layers in place of all.

    Raises:
        NotFoldable: they did not do the same to every layer.
    """
    few = repeat.few.gm
    passes.canonicalize(few)
    passes.name_activations(few)
    passes.localize(few)
    joint_graph_passes(few)
    return repeat.unfolded()


def _compile_graph(frame: Frame, kind: str, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    start = time.perf_counter()
    gm = without_code(gm)
    text = frame.text_of(gm)
    for name, rewrite in passes.GRAPH_PASSES:
        text = frame.passed(kind, name, rewrite(gm, frame.plan), text, gm)
    if kind == "backward":
        passes.verify_all_reduced(gm.graph, frame.plan)
        _donate_nothing()
    program, segments = lower(gm, kind, frame.backend.segments)
    frame.lowered(program, time.perf_counter() - start)
    return Executor(program, segments, frame.runtime) if frame.backend.runs else _never_run


def _never_run(*_: Any) -> list[Any]:
    raise DryRun


def _donate_nothing() -> None:
    """Segments do not write into what the forward saved; so tell AOTAutograd, which else refuses retain_graph=True."""
    context = TracingContext.try_get()
    donated = getattr(context and context.fw_metadata, "bw_donated_idxs", None)
    if donated:
        donated.clear()  # in place: several views of the metadata share the list
