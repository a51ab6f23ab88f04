"""The private names of Dynamo, AOTAutograd and Inductor that compiling a frame needs, patches of them included."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._functorch import aot_autograd as aot
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.constant_folding import add_dont_constant_fold
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.runtime.runtime_utils import cache_dir
from torch._inductor.virtualized import V
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointPolicy

from zerograph.graph.attention import ATTENTION, is_random
from zerograph.graph.torch_private import SAVES_GENERATOR, behind_generator

# Dynamo


def traced_code() -> CodeType:
    """The code of the user's function that Dynamo is tracing; a backend is given no name of it. Seen in 2.11, 2.13."""
    return InstructionTranslator.current_tx().f_code


def graph_breaks() -> dict[str, int]:
    """How often each reason has broken a graph in this process. ``torch._dynamo.explain`` tells it of one call, made
    for that purpose. Seen in 2.11, 2.13."""
    return dict(torch._dynamo.utils.counters["graph_break"])


def ends_at_graph_break(gm: fx.GraphModule) -> bool:
    """Whether the user's code goes on, uncompiled, behind Dynamo's graph. Dynamo keeps the reason on the graph; seen in
    2.11 to 2.13."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and bool(reason.graph_break)


# Fake tensors


def fake_mode_of(values: Sequence[Any] = ()) -> FakeTensorMode | None:
    """The mode that the tensors among ``values`` are fake in, or in which the current frame is traced; documented,
    under a private path. Seen in 2.11, 2.13."""
    return detect_fake_mode(values)


def outside_fake_mode() -> AbstractContextManager[Any]:
    """Inside, tensors are made in no fake mode: those of a graph belong to the mode that it was traced in.
    Seen in 2.11, 2.13."""
    return unset_fake_temporarily()


def fake_as(like: Any, element: Tensor) -> Any:
    """``element``, on the meta device, as a fake tensor of the mode and device of ``like``, which is one.

    Operators in that mode would make the same in five times the time. Seen in 2.11, 2.13.
    """
    return FakeTensor(like.fake_mode, element, like.device)


def is_fake(value: Any) -> bool:
    """Whether ``value`` is a tensor of a graph. Seen in 2.11, 2.13."""
    return isinstance(value, FakeTensor)


# AOTAutograd


def trace_and_split(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    inference: Callable[..., Any],
    partition: Callable[..., Any],
) -> Callable[..., Any]:
    """The callable that AOTAutograd makes of Dynamo's graph with these compilers; documented under a private path.

    Inductor's decompositions are taken, and settings that have no public name either. Effects are threaded as tokens
    inside of the graph. The backward compiles with the forward on every rank: by default that depends on whether shapes
    are dynamic, which may differ between ranks, and one that asks the others about its backward would wait for ranks
    that run already. Seen in 2.11, 2.13.
    """
    compiler = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=select_decomp_table,
        # As Inductor has it: what a forward writes to buffers is written inside the graph.
        keep_inference_input_mutations=True,
    )
    with functorch_config.patch(unlift_effect_tokens=True, force_non_lazy_backward_lowering=True):
        return compiler(gm, inputs)  # type: ignore[no-any-return]


def as_dynamos(made: fx.GraphModule, gm: fx.GraphModule) -> fx.GraphModule:
    """``made``, a part of Dynamo's graph ``gm``, with the attributes by which AOTAutograd knows such a graph.

    Without them it takes no input for one that stays where it is between calls, as parameters do. Seen in 2.13.
    """
    made.meta, made._param_name_to_source = dict(gm.meta), gm._param_name_to_source
    return made


@contextmanager
def as_when_called(joint: fx.GraphModule) -> Iterator[None]:
    """The context that AOTAutograd has around functions that it calls, for a joint graph worked on outside of it."""
    values = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
    with tracing(TracingContext(fake_mode_of(values))), torch.no_grad():
        yield


@contextmanager
def separate_context() -> Iterator[None]:
    """Inside, AOTAutograd writes what it finds out into a copy of the frame's context, which is for the whole graph.
    Seen in 2.11, 2.13."""
    with tracing(copy.copy(TracingContext.get())):
        yield


@contextmanager
def trace_given(joint: fx.GraphModule, fits: Callable[[Sequence[Any]], bool]) -> Iterator[None]:
    """Patch AOTAutograd to take ``joint`` for its trace of a graph with a backward, where ``fits`` says so of the
    inputs.

    It has no other way to be given a trace. Where the graph does more than compute outputs from inputs it is traced as
    ever: AOTAutograd returns what it writes to, and bases of views, in ways of its own. Seen in 2.11, 2.13.
    """
    trace = graph_compile.aot_dispatch_autograd_graph

    def given(flat_fn: Any, flat_args: Any, descs: Any, config: Any, *, fw_metadata: Any) -> Any:
        tangents = list(fw_metadata.traced_tangents)
        if not _is_plain(fw_metadata) or not fits([*flat_args, *tangents]):
            return trace(flat_fn, flat_args, descs, config, fw_metadata=fw_metadata)
        # AOTAutograd's own trace returns its arguments detached.
        detached = tuple([v.detach() if isinstance(v, Tensor) else v for v in given] for given in (flat_args, tangents))
        return joint, detached, (descs, fw_metadata.traced_tangents_descs), None

    with patch.object(graph_compile, "aot_dispatch_autograd_graph", given):
        yield


def _is_plain(metadata: Any) -> bool:
    """Whether AOTAutograd's metadata tells of outputs that are computed from inputs, and of nothing else."""
    return not (
        any(info.mutates_data or info.mutates_metadata for info in metadata.input_info)
        or metadata.num_intermediate_bases
        or metadata.tokens
    )


def split_by_minimum_cut(
    joint: fx.GraphModule, inputs: Sequence[Any], outputs: int, static: Sequence[int]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward, with its first ``outputs`` outputs, and the backward of a joint graph, as torch's partitioner for
    Inductor cuts it. Inputs numbered ``static`` stay where they are.

    It saves what must be (``recompute``) only where the forward's outputs depend on it. Other nodes tagged to be in the
    forward are outputs while it cuts. Attention without dropout, which torch takes for random, is another function
    meanwhile: it would save the generator's state for each layer that is recomputed. What is drawn again gets the fake
    value that torch leaves out. Seen in 2.11, 2.13.
    """
    for node in joint.graph.nodes:
        if node.target in ATTENTION and not is_random(node):
            node.target = _not_random(node.target)
    tags = ((node, node.meta.get("partitioner_tag"), node.meta.get("recompute")) for node in joint.graph.nodes)
    ahead = [n for n, tag, saved in tags if (tag, saved) == ("must_be_in_forward", CheckpointPolicy.MUST_SAVE)]
    _replace_outputs(joint.graph, outputs, outputs, ahead)
    with _use_lazy_graph_module(True):  # else the Python of both would be written twice, and nobody calls it
        forward, backward = min_cut_rematerialization_partition(
            joint,
            inputs,
            compiler="inductor",
            num_fwd_outputs=outputs + len(ahead),
            static_lifetime_input_indices=list(static),
        )
    _replace_outputs(forward.graph, outputs, outputs + len(ahead), ())
    mode = detect_fake_mode([n.meta["val"] for n in joint.graph.find_nodes(op="placeholder")])
    assert mode is not None  # AOTAutograd traces with fake tensors
    for node in (*forward.graph.nodes, *backward.graph.nodes):
        node.target = getattr(node.target, "operator", node.target)
        operator, args = behind_generator(node.target, node.args)
        if operator is not node.target and "val" not in node.meta and node.target is not SAVES_GENERATOR:
            given = fx.node.map_arg(args, lambda n: n.meta["val"])
            with mode:
                node.meta["val"] = operator(*given)
    return forward, backward


@functools.cache
def _not_random(operator: Any) -> Any:
    def attention(*args: Any, **named: Any) -> Any:
        return operator(*args, **named)

    attention.operator = operator  # type: ignore[attr-defined]
    return attention


def _replace_outputs(graph: fx.Graph, begin: int, end: int, nodes: Sequence[fx.Node]) -> None:
    """Let a traced ``graph`` return ``nodes`` in place of its outputs from ``begin`` to before ``end``. AOTAutograd
    describes each in the metadata. Seen in 2.13."""
    (output,) = graph.find_nodes(op="output")
    values = list(output.args[0])
    described = list(output.meta.get("desc", [None] * len(values)))
    output.args = ((*values[:begin], *nodes, *values[end:]),)
    output.meta["desc"] = [*described[:begin], *[None] * len(nodes), *described[end:]]


def keep_saved_tensors() -> None:
    """Tell AOTAutograd that nothing writes into what the forward saved: else it refuses ``retain_graph=True``. Call it
    while the backward compiles. Seen in 2.11, 2.13."""
    context = TracingContext.try_get()
    donated = getattr(context and context.fw_metadata, "bw_donated_idxs", None)
    if donated:
        donated.clear()  # in place: several views of the metadata share the list


def lazily_coded(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A module of ``graph`` that generates its Python when it is called: never, if it is lowered.

    Inductor's own way. A graph of repeated layers, in which nodes share names, cannot be written. ``root`` is another
    graph's module, or a dict of what ``graph`` reads. Seen in 2.11, 2.13.
    """
    return _LazyGraphModule(root, graph)


# Frames on disk


class Uncacheable(Exception):
    """Why a frame is not stored, for people."""


def frame_folder() -> Path | None:
    """Where Inductor's caches are, unless torch's settings forbid that graphs are kept there, or torch is too old.

    There are no public names for it. Seen in 2.13.
    """
    if not hasattr(graph_compile, "_cache_autograd_info"):  # 2.11; nothing tells what AOTAutograd has around programs
        return None
    allowed = functorch_config.enable_autograd_cache and not torch.compiler.config.force_disable_caches
    return Path(cache_dir()) / "zerograph" if allowed else None


def graph_key(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """AOTAutograd's own key of a graph of Dynamo's: its code, its inputs, torch's version and all settings that change
    what becomes of it. Seen in 2.13.

    Raises:
        Uncacheable: AOTAutograd would not keep it.
    """
    try:
        key, _ = aot.autograd_cache_key(
            gm,
            inputs,
            ignore_shape_env=False,
            decompositions=None,
            compiler_config_extra=None,  # type: ignore[arg-type]  # as for graphs that Inductor does not get whole
            keep_inference_input_mutations=True,
        )
    except Exception as error:  # of any kind, as AOTAutograd takes them
        raise Uncacheable(str(error)) from error
    return str(key)


def facts_of_input(value: Any) -> tuple[object, ...]:
    """The facts about ``value``, an input as Dynamo gives it, that a graph may depend on, besides its content. The last
    fact is its memory, of this process. Seen in 2.11, 2.13.

    Raises:
        Uncacheable: it is no plain tensor of known sizes.
    """
    if not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value) or value.layout is not torch.strided:
        raise Uncacheable(f"an input is a {type(value).__name__}")
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if not all(type(size) is int for size in sizes):
        raise Uncacheable("its sizes are dynamic")
    kind = (isinstance(value, torch.nn.Parameter), value.dtype, value.device, value.requires_grad, value.is_leaf)
    return *kind, value.dim(), *sizes, value.untyped_storage()._cdata


def namespace_of(target: Any) -> str:
    """The library that an operator belongs to; empty for what is none. Seen in 2.11, 2.13."""
    if isinstance(target, OpOverloadPacket):
        return str(target._qualified_op_name).partition("::")[0]
    return target.namespace if isinstance(target, OpOverload) else ""


@contextmanager
def noting_wrappers(noted: list[bytes | Uncacheable]) -> Iterator[None]:
    """Patch AOTAutograd to note what it has around the programs that are compiled inside: as bytes for
    :func:`with_wrappers`, or why that would not be all.

    AOTAutograd hands it to its own cache, which takes nothing that Inductor has not compiled. Seen in 2.13.
    """

    def noting(name: str) -> Any:
        keep = getattr(graph_compile, name)
        signature = inspect.signature(keep)

        def note(*args: Any, **kwargs: Any) -> Any:
            kept = keep(*args, **kwargs)  # first: it takes out of the metadata what cannot be pickled
            try:
                noted.append(_wrappers(signature.bind(*args, **kwargs).arguments))
            except Exception as error:  # of any kind: pickle says in many ways that it cannot
                noted.append(Uncacheable(str(error)))
            return kept

        return patch.object(graph_compile, name, note)

    with noting("_cache_autograd_info"), noting("_cache_inference_info"):
        yield


def _wrappers(known: Mapping[str, Any]) -> bytes:
    from torch._functorch._aot_autograd.aot_autograd_result import AOTAutogradResult

    metadata, config = known["fw_metadata"], known["aot_config"]
    if known["maybe_subclass_meta"] is not None or metadata.tokens or config.num_params_buffers:
        raise Uncacheable("it has tensor subclasses, effects or attributes of its own")
    if TracingContext.get().guards_context.aotautograd_guards:
        raise Uncacheable("some of its inputs share memory")
    symbols = known.get("num_symints_saved_for_bw", 0)
    return pickle.dumps(
        AOTAutogradResult(
            compiled_fw=None,  # type: ignore[arg-type]
            compiled_bw=_Loaded(None, symbols) if "bw_module" in known else None,  # type: ignore[arg-type]
            aot_joint_graph_str=None,
            aot_forward_graph_str=None,
            aot_backward_graph_str=None,
            min_cut_info_str=None,
            runtime_metadata=metadata,
            dispatch_wrappers=known["wrappers"],
            maybe_subclass_meta=None,
            num_fw_outs_saved_for_bw=known.get("num_fw_outs_saved_for_bw"),
            indices_of_inps_to_detach=known.get("_indices_of_inps_to_detach", []),
            forward_time_taken_ns=0,
            backward_time_taken_ns=0,
            sanitized_aot_config=config.to_cacheable(),
            guards_expr=None,
            serialized_bw_module=None,
        )
    )


@dataclass
class _Loaded:
    """A program, where AOTAutograd expects what its cache would load."""

    program: Callable[..., Any] | None
    num_symints_saved_for_bw_: int = 0
    backward_state_indices: list[int] = field(default_factory=list)

    def load(self, _: Any) -> Callable[..., Any] | None:
        return self.program

    def post_compile(self, program: Any, _: Any) -> Any:
        return program


def with_wrappers(wrappers: bytes, programs: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The callable that :func:`trace_and_split` returned when ``wrappers`` were noted, around these programs by kind.
    Seen in 2.13."""
    result = pickle.loads(wrappers)
    result.compiled_fw = _Loaded(programs.get("forward") or programs["inference"])
    if result.compiled_bw is not None:
        result.compiled_bw.program = torch._dynamo.disable(programs["backward"], reason="compiled already")
    run = result.wrap_post_compile([], result.sanitized_aot_config, {})
    return torch._dynamo.disable(lambda *inputs: run([*inputs]), reason="compiled already")  # type: ignore[no-any-return]


# DTensor


class ShardOf:
    """How the local tensors of a DTensor are put together, for wrapping others like them.

    ``DTensor.from_local`` does it anew each time, which hundreds of gradients in every step would pay for.
    Seen in 2.11, 2.13.
    """

    __slots__ = ("_spec",)

    def __init__(self, shard: DTensor) -> None:
        self._spec = shard._spec

    def wrap(self, local: Tensor) -> DTensor:
        """``local`` as a DTensor that is placed as the given one is."""
        return DTensor(local, self._spec, requires_grad=False)


# Inductor


def simplify_joint(gm: fx.GraphModule) -> None:
    """Inductor's own passes over the graph of a step, in place: attention fusions, constants, needless views and casts.

    Seen in 2.11, 2.13.
    """
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with V.set_fake_mode(fake_mode_of(inputs)):  # where they look for it
        joint_graph_passes(gm)


def float32_products() -> tuple[str, str]:
    """How torch computes float32 products, by the newer of its two settings, which knows of both: on CUDA, on CPUs.
    ``torch.get_float32_matmul_precision`` raises where the newer one was used. Seen in 2.11, 2.13.
    """
    backends: Any = torch.backends  # torch does not type its settings
    return backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision


def never_constant_fold(operator: Any) -> None:
    """Keep those passes from replacing ``operator`` by its result where its inputs are constants.
    Seen in 2.11, 2.13."""
    add_dont_constant_fold(operator)
