"""Small graphs for tests of passes: build them by hand, plan them, print them, and run them on plain tensors."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from zerograph.compiler.capture import capture
from zerograph.core.layout import largest
from zerograph.core.plan import Bucket, Plan
from zerograph.dryrun.compile_only import simulated_rank
from zerograph.graph import ops
from zerograph.passes import PIPELINE, Pass

aten = torch.ops.aten


fake_world = simulated_rank


class Builder:
    """Builds a graph node by node, with fake values and a line of an imaginary ``model.py`` on each.

    Set ``module`` to the path of the module that the following nodes belong to.
    """

    def __init__(self, world_size: int = 2) -> None:
        self.module: str | None = None
        self.graph, self.mode, self.world_size, self.line = fx.Graph(), FakeTensorMode(), world_size, 0

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        """A graph input."""
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def params(self, *names: str, shape: tuple[int, ...] = (4, 4), **spec: Any) -> list[fx.Node]:
        """Markers of parameters of one shape; their shards ``<name>_shard`` become inputs."""
        rows = largest(shape[0], self.world_size) if spec.get("sharded", True) else shape[0]
        shards = [self.input(f"{name}_shard", rows, *shape[1:]) for name in names]
        return [self.unshard(shard, name, shape, **spec) for shard, name in zip(shards, names, strict=True)]

    def unshard(self, shard: fx.Node, name: str, shape: tuple[int, ...], **spec: Any) -> fx.Node:
        """The marker of ``name``."""
        return self.call(ops.UNSHARD, shard, list(shape), *_spec(name, **spec), name=f"{name}_full")

    def reduce_grad(self, grad: fx.Node, marker: fx.Node) -> fx.Node:
        """The marker of the gradient of the parameter ``marker``."""
        shard = marker.args[0].meta["val"]
        node = self.call(ops.REDUCE_GRAD, grad, list(shard.shape), shard.dtype, *marker.args[2:])
        node.meta["partitioner_tag"] = "is_backward"
        return node

    def call(self, target: Any, *args: Any, name: str | None = None) -> fx.Node:
        """Call ``target``; its fake value is computed."""
        node = self.graph.create_node("call_function", target, args, name=name)
        with self.mode:
            node.meta["val"] = target(*fx.node.map_arg(args, lambda n: n.meta["val"]))
        self.line += 1
        node.meta["stack_trace"] = f'  File "model.py", line {self.line}, in forward'
        if self.module is not None:
            node.meta["nn_module_stack"] = {"module": (self.module, object)}
        return node

    def mm(self, a: fx.Node, b: fx.Node) -> fx.Node:
        """A matrix product."""
        return self.call(aten.mm.default, a, b)

    def output(self, *nodes: fx.Node | None) -> fx.GraphModule:
        """End the graph."""
        self.graph.output(nodes)
        self.graph.lint()
        return fx.GraphModule({}, self.graph)


def _spec(
    name: str,
    group: str = "0",
    dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
    sharded: bool = True,
) -> tuple[Any, ...]:
    return name, group, dtype, reduce_dtype, sharded


def plan(gm: fx.GraphModule, *buckets: str, prefetch: int = 1, world_size: int = 2) -> Plan:
    """A plan whose buckets hold the parameters named in each text, separated by blanks."""
    params = {p.name: p for p in capture(gm.graph, training=True, world_size=world_size).params}
    made = (Bucket(i, text, tuple(params[n] for n in text.split()), "use") for i, text in enumerate(buckets))
    return Plan(3, world_size, tuple(made), prefetch)


def pipeline_with(name: str, run: Callable[..., int]) -> tuple[Pass, ...]:
    """All passes, with ``run`` in the place of the one of that name."""
    return tuple(step._replace(run=run) if step.name == name else step for step in PIPELINE)


def show(gm: fx.GraphModule) -> str:
    """The graph, which must be valid, without its inputs, one node a line: ``name = op(args)``."""
    gm.graph.lint()
    lines = []
    for node in gm.graph.nodes:
        args = ", ".join(_show(a) for a in _args_shown(node))
        if node.op == "output":
            lines.append(f"return {args}")
        elif node.op != "placeholder":
            lines.append(f"{node.name} = {_op(node.target)}({args})")
    return "\n".join(lines)


def _args_shown(node: fx.Node) -> Sequence[Any]:
    """Of a marker, the tensor and the parameter's name; all arguments of anything else."""
    if node.target is ops.UNSHARD:
        return node.args[0], node.args[2]
    if node.target is ops.REDUCE_GRAD:
        return node.args[0], node.args[3]
    return (*node.args, *node.kwargs.values())


def _show(arg: Any) -> str:
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(_show(a) for a in arg)}]"
    return arg.name if isinstance(arg, fx.Node) else str(arg)


def _op(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    return re.sub(r"^(aten|zg|prims)\.|\.(default|Tensor)$", "", str(target))


class Poisoned(fx.Interpreter):
    """Runs a graph as one rank would: gathers copy, and a freed parameter turns into NaN at once."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.unsharded = self.peak = 0

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Give ``zg::`` nodes a meaning without ranks."""
        if target is ops.UNSHARD:
            return args[0].clone()
        if target is ops.GATHER:
            self.unsharded += 1
            self.peak = max(self.peak, self.unsharded)
            return [shard.clone() for shard in args[0]]
        if target is ops.WAIT_GATHER:
            return args[0]
        if target is ops.FREE:
            self.unsharded -= 1
            return [full.fill_(float("nan")) for full in args[0]]
        if target is ops.REDUCE:
            return [grad.clone() for grad in args[0]]
        if target in (ops.WAIT_REDUCE, ops.REDUCE_GRAD):
            return args[0]
        return super().call_function(target, args, kwargs)


def run(gm: fx.GraphModule) -> tuple[list[Any], int]:
    """Outputs on seeded inputs of the shapes of full parameters, and the most buckets that were whole at a time."""
    generator = torch.Generator().manual_seed(0)
    inputs = [_full(node, generator) for node in gm.graph.find_nodes(op="placeholder", sort=True)]
    interpreter = Poisoned(gm)
    return list(interpreter.run(*inputs)), interpreter.peak


def _full(node: fx.Node, generator: torch.Generator) -> torch.Tensor:
    val = node.meta["val"]
    full = node.meta.get("full", tuple(val.shape))
    return torch.randn(full, generator=generator, dtype=torch.float32).to(val.dtype)
