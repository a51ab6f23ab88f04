"""Plan by rule: buckets follow the module structure, residency follows the stage.

The rules are those of hand-tuned systems: one transformer block is one bucket (FSDP, SimpleFSDP), a block larger than
the limit is split, and small neighbours travel together.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import groupby

from zerograph.core.config import Recompute
from zerograph.core.machine import Tier
from zerograph.core.plan import DEVICE, Bucket, Overlap, Placement, Plan, Residency, Update
from zerograph.core.step import Param, Step, layer_of

log = logging.getLogger(__name__)

_SMALL = 8  # groups below 1/8 of the bucket size join their neighbour


def plan_step(
    step: Step,
    *,
    stage: int,
    world_size: int,
    bucket_size: int,
    prefetch: int,
    recompute: Recompute = "auto",
    placement: Placement = DEVICE,
    saved: Tier = "device",
    update: Update = "host",
    overlap: Overlap = "none",
    tiles: Mapping[str, int] | None = None,
    replicas: int = 1,
    hosts: int = 1,
    whole_layers: bool = False,
) -> Plan:
    """The plan for ``step`` at a fixed stage.

    Args:
        step: the traced step; its parameters are in order of first use.
        stage: 0 to 3; from stage 3 on, parameters are unsharded only while they are used.
        world_size: ranks to shard over.
        bucket_size: bytes of gathered parameters per bucket, at most, unless one parameter is larger or layers are
            whole.
        prefetch: buckets gathered ahead.
        recompute: which activations the backward computes again, see :class:`~zerograph.core.config.Config`.
        placement: of buckets with trained parameters.
        saved: where what repeated layers save waits for the backward.
        update: where states on the host are updated.
        overlap: what updates of states off the device run beside.
        tiles: of parameters that are in several, by name; each has a bucket of its own.
        replicas: ranks that hold the same shards.
        hosts: between which the ranks that shard over each other communicate in a level of its own.
        whole_layers: whether the parameters of a repeated layer share a bucket, however large.
    """
    tiles = tiles or {}
    residency: Residency = "use" if stage == 3 else "step"
    buckets = tuple(
        Bucket(index, _name(params), params, residency, _placement(params, placement), tiles.get(params[0].name, 1))
        for index, params in enumerate(_buckets(step.over(world_size).params, bucket_size, tiles, whole_layers))
    )
    return Plan(
        stage=stage,
        world_size=world_size,
        buckets=buckets,
        prefetch=prefetch,
        recompute=recomputed_layers(step, recompute),
        save_others=recompute == "none",
        offload=tuple((layer, saved) for layer in _layers(step, f"activations={saved!r}")) if saved != "device" else (),
        update=update,
        overlap=overlap,
        replicas=replicas,
        hosts=1 if any(p.experts > 1 for p in step.params) else hosts,  # experts are gathered over other ranks
        # One is on its way to replicas, or between hosts, while the next one is summed where ranks are near. Ranks of
        # several hosts are never at quite the same place: a third lets none wait for another's part.
        reductions=3 if hosts > 1 else 2 if replicas > 1 else 1,
    )


def _placement(params: Iterable[Param], placement: Placement) -> Placement:
    """The placement of ``params`` by ``placement``: where nothing trains, only the parameters leave."""
    return placement if placement.parameters != "device" or any(p.trainable for p in params) else DEVICE


def layer_of_param(name: str) -> str:
    """The repeated layer a parameter belongs to (``model.layers.3``), or the empty string."""
    return layer_of(name.rpartition(".")[0])


def recomputed_layers(step: Step, recompute: Recompute) -> tuple[str, ...]:
    """The layers that are recomputed fully: the share that was asked for, evenly spread over the depth."""
    share = _SHARES[recompute] if isinstance(recompute, str) else recompute
    layers = _layers(step, f"recompute={recompute!r}") if share else []
    count = int(share * len(layers) + 0.5)
    # As evenly as whole numbers allow: layers at which the running share passes the next whole number.
    return tuple(layer for i, layer in enumerate(layers) if (i + 1) * count // len(layers) > i * count // len(layers))


def _layers(step: Step, asked: str) -> list[str]:
    """The repeated layers of a training step; warns where what was ``asked`` of them finds none."""
    layers = list(dict.fromkeys(layer for op in step.ops if (layer := layer_of(op.module)))) if step.training else []
    if step.training and not layers:
        log.warning(
            "%s: this graph has no repeated layers (modules in nn.ModuleList or nn.Sequential), so what the "
            "partitioner would save is saved as ever; use torch.utils.checkpoint to say what to recompute",
            asked,
        )
    return layers


_SHARES = {"auto": 0.0, "none": 0.0, "full": 1.0}


def _buckets(params: Sequence[Param], limit: int, alone: Container[str], whole_layers: bool) -> list[tuple[Param, ...]]:
    place = {p.name: at for at, p in enumerate(params)}
    found = _group((p for p in params if p.name not in alone), limit, whole_layers)
    found += [(p,) for p in params if p.name in alone]
    return sorted(found, key=lambda group: min(place[p.name] for p in group))


def _group(params: Iterable[Param], limit: int, whole_layers: bool) -> list[tuple[Param, ...]]:
    layers = ((layer, tuple(members)) for layer, members in groupby(params, key=lambda p: layer_of_param(p.name)))
    parts = (part for layer, own in layers for part in ([own] if layer and whole_layers else _split(own, limit)))
    # Only small ones: a block that shares a bucket with half of the next would no longer repeat.
    return _packed(parts, limit // _SMALL)


def _split(params: tuple[Param, ...], limit: int) -> list[tuple[Param, ...]]:
    """Consecutive parts of at most ``limit`` bytes; the parameters of one module stay together where they fit."""
    modules = (tuple(members) for _, members in groupby(params, key=lambda p: p.name.rpartition(".")[0]))
    return _packed(
        (piece for module in modules for piece in ([module] if _bytes(module) <= limit else [(p,) for p in module])),
        limit,
    )


def _packed(pieces: Iterable[tuple[Param, ...]], limit: int) -> list[tuple[Param, ...]]:
    """Neighbours together, as far as they come to ``limit`` bytes."""
    found, room = list[list[Param]](), 0
    for piece in pieces:
        size = _bytes(piece)
        if not found or size > room:
            found.append([])
            room = limit
        found[-1] += piece
        room -= size
    return [tuple(part) for part in found]


def _bytes(params: tuple[Param, ...]) -> int:
    return sum(p.gathered_bytes for p in params)


def _name(params: tuple[Param, ...]) -> str:
    layers = list(dict.fromkeys(layer_of_param(p.name) or p.name.rpartition(".")[0] or p.name for p in params))
    return layers[0] if len(layers) == 1 else f"{layers[0]} .. {layers[-1]}"
