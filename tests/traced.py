"""What Dynamo and AOTAutograd make of a model, kept, and models that are called by it.

They take a second for the smallest model, and most tests differ in what comes behind them: plans, passes, the runtime.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zerograph.api import Backend
from zerograph.compiler import driver
from zerograph.compiler.compilation import Compilation
from zerograph.compiler.driver import _checked, _plan_and_prepare, compile_joint, to_program
from zerograph.compiler.frame import Frame
from zerograph.compiler.lowering.segments import Callee
from zerograph.compiler.repetition.repeat import Joint
from zerograph.compiler.repetition.shorten import _Traced, joint_of
from zerograph.compiler.shard_inputs import _exchanging
from zerograph.compiler.torch_private import as_when_called, lazily_coded, simplify_joint, trace_and_split
from zerograph.core.garbage import without_gc
from zerograph.core.param_bytes import Plain
from zerograph.graph.nodes import output_of
from zerograph.runtime.executor.executor import Executor
from zerograph.runtime.torch_private import local_tensor

CPU = torch.device("cpu")
Programs = tuple[Frame, dict[str, tuple[Callee, ...]]]
"""A compiled frame, and the callables of its programs' segments."""


@dataclass(frozen=True, slots=True)
class Graph:
    """What Dynamo records of a call, and AOTAutograd makes of it.

    Attributes:
        joint: of a call that trains; of one without gradients its graph.
        inputs: of each input the parameter's or buffer's name, or the place among the arguments; a mesh is itself.
        rows: places of inputs that are sharded parameters.
        plain, ends_at_break: see :class:`~zerograph.compiler.frame.Frame`.
        trains: whether there is a backward.
        simple: the graph behind Inductor's passes, which ask for no plan, once they ran.
    """

    joint: Joint
    inputs: tuple[str | int | DeviceMesh, ...]
    rows: tuple[int, ...]
    plain: Sequence[Plain]
    ends_at_break: bool
    trains: bool
    simple: list[fx.GraphModule] = field(default_factory=list)

    def compiled(self, compilation: Compilation, index: int) -> Programs:
        """What the compiler of a backend makes of it."""
        frame = Frame(compilation, index, "model", self.plain, self.ends_at_break)
        gm = _copied(self.joint.gm)
        with patch.object(driver, "simplify_joint", self._simplify):
            if self.trains:
                return frame, compile_joint(frame, self.joint._replace(gm=gm))
            with without_gc(), as_when_called(gm):
                _plan_and_prepare(frame, "inference", gm)
                return frame, {"inference": to_program(frame, "inference", gm)}

    def _simplify(self, gm: fx.GraphModule) -> None:
        if not self.simple:
            simplify_joint(gm)
            self.simple.append(_copied(gm))
        gm.__dict__.update(_copied(self.simple[0]).__dict__)

    def call(self, executors: Mapping[str, Executor], named: Mapping[str, Any], given: Sequence[Any]) -> Any:
        """What the model returns for the arguments ``given``, of parameters and buffers by name."""
        read = [given[i] if isinstance(i, int) else named[i] if isinstance(i, str) else i for i in self.inputs]
        if self.trains:
            run = functools.partial(_Step.apply, executors["forward"], executors["backward"])
            return _exchanging(run, self.rows)(*read)
        for place in self.rows:
            read[place] = local_tensor(read[place]).detach()
        return executors["inference"](read)[0]


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """For one run to change."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {})).meta = dict(output_of(gm.graph).meta)
    return lazily_coded(gm, graph)


def trace(backend: Backend, model: nn.Module, params: Mapping[str, nn.Parameter], given: Sequence[Any]) -> Graph:
    """What comes of a call of ``model``, which returns one tensor and whose ``params`` are those of the ``backend``."""
    found: list[Graph] = []
    trains = torch.is_grad_enabled()
    known: dict[int, str | int] = {id(value): place for place, value in enumerate(given)}
    known |= {id(value): name for name, value in (*model.named_buffers(), *params.items())}

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        outputs = [torch.zeros(node.meta["example_value"].shape) for node in output_of(gm.graph).args[0]]
        places = tuple(place for place, x in enumerate(inputs) if isinstance(x, DTensor))
        frame = Frame(backend._compilation, 0, "model")
        rows, _ = _checked(frame, gm, inputs)
        with without_gc():
            joint = joint_of(gm, rows) if trains else _inference_of(gm, rows)
        assert joint is not None, "nothing of it trains"
        names = tuple(x if isinstance(x, DeviceMesh) else known[id(x)] for x in inputs)
        found.append(Graph(joint, names, places, frame.plain, frame.ends_at_break, trains))
        return lambda *_: outputs

    torch.compiler.reset()
    with patch.object(model, "_compiled_call_impl", None):  # where compile_once() put what asks for this
        torch.compile(model, backend=compiler, fullgraph=True, dynamic=False)(*given)
    torch.compiler.reset()  # or Dynamo would hold the model and its backend
    return found[0]


def compile_once(model: nn.Module, backend: Backend, kind: Any = None) -> None:
    """As ``model.compile(backend=backend)``, of a model that is traced once in a process: see :class:`TracedOnce`."""
    model._compiled_call_impl = TracedOnce(model, backend, kind)


class TracedOnce:
    """As ``torch.compile(model, backend=backend)``, of a model that is traced once in a process, for all like it.

    The model returns one tensor. Its class, the arguments it is called with (of tensors the shapes and dtypes), the
    options of its backend that change graphs, and ``kind``, for what hooks change of a model, tell which models are
    alike; Dynamo's guards check nothing.
    """

    _graphs: dict[Any, Graph] = {}

    def __init__(self, model: nn.Module, backend: Backend, kind: Any = None) -> None:
        self.model, self.backend, self.kind = model, backend, kind
        self._loaded: dict[Any, tuple[Graph, dict[str, Executor]]] = {}

    def __call__(self, *given: Any) -> Tensor:
        """What the model returns for these arguments, tensors or constants that can be keys."""
        adoption = self.backend._adoption
        if adoption.ranks is None:
            adoption.shard([self.model], next(self.model.parameters()).device)
        params = adoption.params or dict(self.model.named_parameters())
        named = {**dict(self.model.named_buffers()), **params}
        key = self._key((*given, *named.values()))
        if key not in self._loaded:
            loaded = self._load(key, params, given)
            if loaded is None:
                return self(*given)
            self._loaded[key] = loaded
        graph, executors = self._loaded[key]
        answer: Tensor = graph.call(executors, named, given)
        return answer

    def _key(self, given: Iterable[Any]) -> tuple[Any, ...]:
        config, ranks = self.backend.config, self.backend._adoption.ranks
        assert ranks is not None
        values = tuple(
            (tuple(x.shape), x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else (type(x), x)
            for x in given
        )
        leaves = ranks.size == 1 and config.offloads  # else a lone rank splits nothing
        options = config.sharding == 0, config.dtype, config.reduce_dtype, config.loss_only, leaves
        # Ranks of other numbers have other shards.
        model = type(self.model), self.kind, self.model.training
        return model, torch.is_grad_enabled(), ranks.size, options, values

    def _load(
        self, key: Any, params: Mapping[str, nn.Parameter], given: Sequence[Any]
    ) -> tuple[Graph, dict[str, Executor]] | None:
        """The graph and the executors of its programs; None where their plan has parameters off an accelerator."""
        backend = self.backend
        with backend._adoption.compiling("model"):
            if key not in self._graphs:
                trains = torch.is_grad_enabled()  # as it is inside of an inference mode, and not when that is left
                with torch.inference_mode(False), torch.set_grad_enabled(trains):
                    self._graphs[key] = trace(backend, self.model, params, given)
            graph = self._graphs[key]
            frame, segments = graph.compiled(backend._compilation, len(backend._frames))
            backend._frames.append(frame)
            if (agreement := backend._compilation.agreement) is not None:
                for program in frame.programs.values():
                    agreement.check(frame.code, program)
            if graph.trains and (late := backend._adoption.late(frame.plan)):
                backend._frames.pop()
                backend._adoption.leave(late)
                return None
            if graph.trains:
                backend._place_shards(frame)
        assert frame.runtime is not None
        return graph, {kind: Executor(frame.programs[kind], segments[kind], frame.runtime) for kind in segments}


def _inference_of(gm: fx.GraphModule, inputs: Sequence[Any]) -> Joint | None:
    def compiles(gm: fx.GraphModule, _: Sequence[Any]) -> Any:
        raise _Traced(Joint(gm, len(output_of(gm.graph).args[0]), []))  # type: ignore[arg-type]

    try:
        trace_and_split(gm, inputs, forward=compiles, backward=compiles, inference=compiles, partition=compiles)
    except _Traced as traced:
        return traced.joint
    raise AssertionError("AOTAutograd compiles nothing")


class _Step(torch.autograd.Function):
    """Forward and backward as AOTAutograd calls them."""

    @staticmethod
    def forward(ctx: Any, forward: Executor, backward: Executor, *inputs: Any) -> Tensor:
        value, *saved = forward(list(inputs))
        ctx.save_for_backward(*saved)
        ctx.run = backward
        return value

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.run([*ctx.saved_tensors, tangent])
