"""Gives the compiler plain tensors: each call exchanges sharded parameters for this rank's rows of them.

AOTAutograd can take DTensors apart by itself, and then traces everything twice: once around the DTensors, once around
what is in them. A graph as Dynamo records it asks a parameter for its rows and nothing else, so that is done outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from zerograph.compiler.torch_private import ShardOf, fake_mode_of
from zerograph.graph.nodes import CHECKPOINT, graph_named
from zerograph.runtime.torch_private import local_tensor


def take_local_shards(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[list[Any], Callable[..., Any]]:
    """Let ``gm`` read rows where it reads DTensors and asks them for their rows only.

    Returns:
        The inputs to trace the graph with from now on, and what makes of a function of those one of ``gm``'s own.
    """
    bodies = [str(node.args[0]) for node in gm.graph.nodes if _region(gm, node) is not None]
    assert len(set(bodies)) == len(bodies)  # Dynamo makes one per call; a shared one could not be changed for one user
    traced, places = list(inputs), []
    for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        reads = _reads(gm, node) if isinstance(inputs[place], DTensor) else None
        if reads is None:
            continue
        for read in reads:
            _drop(read)
        traced[place] = _fake_rows(inputs[place])
        places.append(place)
    for module in gm.modules() if places else ():
        if isinstance(module, fx.GraphModule):
            module.recompile()
    return traced, lambda compiled: _exchanging(compiled, places)


def _reads(gm: fx.GraphModule, tensor: fx.Node) -> dict[fx.Node, None] | None:
    """Where ``tensor`` is asked for its rows, in checkpointed regions too; None when it is asked for anything else."""
    found: dict[fx.Node, None] = {}
    for user in tensor.users:
        if _reads_rows(user):
            found[user] = None
            continue
        body = _region(gm, user)
        # Any other use needs the DTensor itself, which AOTAutograd then takes apart.
        if body is None:
            return None
        inner = body.graph.find_nodes(op="placeholder")
        for place, arg in enumerate(user.args[1:]):
            reads = _reads(body, inner[place]) if arg is tensor else {}
            if reads is None:
                return None
            found |= reads
    return found


def _reads_rows(user: fx.Node) -> bool:
    if user.op == "call_method":
        return user.target == "to_local"
    return getattr(user.target, "__name__", "") == "prim_to_local"  # so torch 2.11 calls it


def _region(gm: fx.GraphModule, user: fx.Node) -> fx.GraphModule | None:
    """The graph that ``user`` runs under ``torch.utils.checkpoint``; None when it does something else."""
    return graph_named(gm, user.args[0]) if user.target is CHECKPOINT else None


def _drop(read: fx.Node) -> None:
    source = read.args[0]
    assert isinstance(source, fx.Node)
    # The placeholder now is what the read gave: repetition and AOTAutograd look at its value.
    source.meta["example_value"] = read.meta.get("example_value")
    read.replace_all_uses_with(source)
    read.graph.erase_node(read)


def _fake_rows(shard: DTensor) -> Tensor:
    rows, mode = local_tensor(shard), fake_mode_of()
    assert mode is not None  # Dynamo has one while it compiles
    with mode:
        return torch.empty_strided(
            rows.shape, rows.stride(), dtype=rows.dtype, device=rows.device, requires_grad=shard.requires_grad
        )


def _exchanging(compiled: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    if not places:
        return compiled

    def call(*inputs: Any) -> Any:
        values = list(inputs)
        # One node of autograd for all: hundreds of them would cost the host in every step.
        for place, rows in zip(places, _Rows.apply(*(inputs[place] for place in places)), strict=True):
            values[place] = rows
        return compiled(*values)

    return call


class _Rows(torch.autograd.Function):
    """This rank's rows of each DTensor, by one node of autograd for all of them; gradients return as DTensors."""

    @staticmethod
    def forward(ctx: Any, *shards: DTensor) -> tuple[Tensor, ...]:
        ctx.shards = [ShardOf(shard) for shard in shards]
        # A parameter without a gradient must end with None, as in plain PyTorch; zeros would let AdamW decay it.
        ctx.set_materialize_grads(False)
        rows = tuple(local_tensor(shard).detach() for shard in shards)
        # A frozen parameter's rows: autograd would ask for a gradient that nobody computes.
        ctx.mark_non_differentiable(*(r for r, shard in zip(rows, shards, strict=True) if not shard.requires_grad))
        return rows

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[DTensor | None, ...]:
        return tuple(None if grad is None else shard.wrap(grad) for grad, shard in zip(grads, ctx.shards, strict=True))
