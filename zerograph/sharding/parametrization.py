"""Parameters of a model become sharded ones, in place: outward DTensors, started from rank 0's values."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from zerograph.core.config import Config
from zerograph.core.machine import Tier
from zerograph.core.units import format_bytes
from zerograph.runtime.comm.axes import axes_of
from zerograph.runtime.dtensors import placements_of, shard_ranks
from zerograph.runtime.executor.uncompiled import UncompiledReads
from zerograph.runtime.offload.host import HostMemory
from zerograph.runtime.torch_private import local_tensor
from zerograph.sharding.adopt import modules_holding, replace_everywhere
from zerograph.sharding.forward import count_running_call
from zerograph.sharding.host_parameters import moved, outward_tier, placement_by_name
from zerograph.sharding.module_classes import class_of, generate_classes, own_modules, present
from zerograph.sharding.optimizer_states import early_states, share
from zerograph.sharding.parallel import Parallel, parallels_of, placed_on_both, shared_part
from zerograph.sharding.ranks import Ranks
from zerograph.sharding.shards import as_shard, local_rows
from zerograph.sharding.spec import ShardSpec, spec_of
from zerograph.sharding.torch_private import share_hooks
from zerograph.sharding.unsupported_modules import refuse_modules

log = logging.getLogger(__name__)

Places = list[tuple[nn.Module, str]]
"""Where a parameter lives: the modules that own it and the attribute in each."""


def shard_parameters(
    roots: Sequence[nn.Module],
    config: Config,
    ranks: Ranks,
    objects: Sequence[Any],
    taken: Container[str],
    reads: UncompiledReads | None,
    everything: Callable[[], list[Any]],
) -> dict[str, nn.Parameter]:
    """Shard every parameter of ``roots``, in place; returns the outward ones by name.

    All ranks call this together; values, and states of optimizers, are those of rank 0. Optimizers, and lists of
    parameters, that hold the old parameters hold the new ones afterwards. Parameters on the meta device become
    uninitialized shards on the meta device.

    Args:
        objects: all modules and optimizers of the process.
        taken: names that parameters of other models have.
        reads: how code reads them that is not compiled; None in one process.
        everything: returns the objects among which optimizers and lists are looked for.

    Raises:
        UnsupportedError: a parameter that cannot be sharded, before anything was changed.
    """
    mesh = ranks.mesh
    refuse_modules(roots, several_ranks=mesh is not None)
    named, places = _owned(roots, taken, objects)
    # Everything that may be refused comes before the first change: a model is sharded wholly or not at all.
    _make_classes(roots, places)
    parallel = parallels_of(named, mesh, ranks.experts)
    over = {name: parallel[name].ours if name in parallel else mesh for name in named}
    specs = {name: spec_of(param, name, config, mesh, parallel.get(name)) for name, param in named.items()}
    tiers: dict[str, Tier] = dict.fromkeys(named, "device")
    if ranks.host is not None:
        placement = placement_by_name(config)
        for name, plain in named.items():
            if specs[name].sharded:
                tiers[name] = outward_tier(placement(name), plain)
            if tiers[name] != "device":
                specs[name] = specs[name]._replace(device=ranks.device)
    _warn_of_few_rows(named, specs, over)
    new = {
        name: _new_parameter(param, specs[name], tiers[name], ranks, config.sharding, parallel.get(name))
        for name, param in named.items()
    }
    # Before optimizers get the new parameters: then their states are split like these, which must be rank 0's by now.
    for own in dict.fromkeys(over.values()):
        share(early_states({n: p for n, p in named.items() if over[n] == own}, objects).values(), own)
    share(dict.fromkeys(buffer for root in roots for buffer in root.buffers()), mesh)
    for name, param in named.items():
        for module, attribute in places[id(param)]:
            present(module, attribute, new[name], specs[name], parallel.get(name))
    generate_classes(roots, reads)
    count_running_call(own_modules(roots))
    replace_everywhere({id(old): (old, new[name]) for name, old in named.items()}, convert_state, everything)
    return new


def _warn_of_few_rows(
    named: Mapping[str, nn.Parameter], specs: Mapping[str, ShardSpec], over: Mapping[str, DeviceMesh | None]
) -> None:
    """Say what has fewer rows than ranks and stays unsharded, where it is more than scalars and small vectors."""
    if not any(spec.sharded for spec in specs.values()):
        return
    ranks = {name: shard_ranks(mesh) for name, mesh in over.items() if mesh is not None}
    left = {n: p.nbytes for n, p in named.items() if p.ndim > 1 and not specs[n].sharded and ranks.get(n, 1) > 1}
    if sum(left.values()) > sum(p.nbytes for p in named.values()) / 100:
        log.warning(
            "%d parameters that the %d ranks cannot split evenly stay whole on each, %s: %s",
            len(left), max(map(ranks.__getitem__, left)), format_bytes(sum(left.values())), ", ".join(list(left)[:3]),
        )  # fmt: skip


def _owned(
    roots: Sequence[nn.Module], taken: Container[str], objects: Sequence[Any]
) -> tuple[dict[str, nn.Parameter], dict[int, Places]]:
    """The parameters of ``roots`` that are not sharded yet, by unique name, and where each lives, in modules of
    ``objects`` too."""
    named: dict[str, nn.Parameter] = {}
    places: dict[int, Places] = {}
    for root in roots:
        for prefix, module in root.named_modules():
            for attribute, param in module._parameters.items():
                if param is None or attribute in module.__dict__.get("_zg_specs", ()):
                    continue
                if id(param) not in places:
                    name = f"{prefix}.{attribute}".removeprefix("_orig_mod.").lstrip(".")
                    named[unique(name, named, taken)] = param
                if (module, attribute) not in places.setdefault(id(param), []):
                    places[id(param)].append((module, attribute))
    for module in modules_holding(named.values(), objects):
        for attribute, param in module._parameters.items():
            if id(param) in places and (module, attribute) not in places[id(param)]:
                places[id(param)].append((module, attribute))
    return named, places


def other_names(roots: Sequence[nn.Module], params: Mapping[str, nn.Parameter]) -> dict[str, tuple[str, ...]]:
    """For each of ``params`` that its model has more than one name for, the other ones."""
    first = {id(param): name for name, param in params.items()}
    found: dict[str, tuple[str, ...]] = {}
    for root in roots:
        names: dict[str, list[str]] = {}
        for name, param in root.named_parameters(remove_duplicate=False):
            if id(param) in first:
                names.setdefault(first[id(param)], []).append(name.removeprefix("_orig_mod."))
        found |= {n: tuple(o for o in all_ if o != n) for n, all_ in names.items() if n in all_ and len(all_) > 1}
    return found


def _make_classes(roots: Sequence[nn.Module], places: Mapping[int, Places]) -> None:
    """Generate every class that will be needed, while an error changes nothing yet."""
    names = {module: set[str]() for module in own_modules(roots)}
    for module, attribute in (place for where in places.values() for place in where):
        names.setdefault(module, set()).add(attribute)
    for module, attributes in names.items():
        class_of(module, attributes.union(module.__dict__.get("_zg_specs", ())))


def unique(name: str, *used: Container[str]) -> str:
    # Two models of one backend may have parameters of one name.
    candidates = itertools.chain([name], (f"{name}#{i}" for i in itertools.count(2)))
    return next(c for c in candidates if not any(c in names for names in used))


def _new_parameter(
    param: nn.Parameter, spec: ShardSpec, tier: Tier, ranks: Ranks, stage: int, parallel: Parallel | None
) -> nn.Parameter:
    # Optimizers take DTensors or plain tensors, not both, and experts are DTensors at every stage.
    value = distribute(param, spec, ranks.mesh, stage if ranks.experts is None else 3, parallel)
    if tier != "device" and ranks.host is not None and not value.is_meta:
        value = moved(value, tier, ranks.host)
    new = nn.Parameter(value, requires_grad=param.requires_grad)
    if param.grad is not None:
        own = ranks.mesh if parallel is None else parallel.ours
        new.grad = _convert_grad(param.grad, new, own, ranks.size * ranks.replicas)
    _take_marks(new, param)
    return new


def leave(
    params: Mapping[str, nn.Parameter], tiers: Mapping[str, Tier], ranks: Ranks, objects: Sequence[Any]
) -> dict[str, nn.Parameter]:
    """Take the sharded ``params`` off the device, to ``tiers``, where a plan has them that was made after they were
    sharded; returns the outward ones that are in their places from now on, by name. No communication."""
    host = ranks.host
    assert host is not None
    new: dict[int, tuple[Tensor, nn.Parameter]] = {}
    for name, param in params.items():
        hosted = nn.Parameter(moved(param, tiers[name], host), requires_grad=param.requires_grad)
        if param.grad is not None:
            hosted.grad = moved(param.grad, tiers[name], host)
        _take_marks(hosted, param)
        new[id(param)] = (param, hosted)
    for module in modules_holding(params.values(), objects):
        for attribute, held in list(module._parameters.items()):
            if id(held) in new:
                spec = module.__dict__["_zg_specs"][attribute]._replace(device=ranks.device)
                present(module, attribute, new[id(held)][1], spec)
    replace_everywhere(new, lambda value, param: _follow(value, param, host))
    return {name: new[id(param)][1] for name, param in params.items()}


def _follow(value: Any, param: nn.Parameter, host: HostMemory) -> Any:
    """State of an optimizer whose parameter went to the host."""
    return moved(value, "host", host) if isinstance(value, Tensor) and value.shape == param.shape else value


def _take_marks(new: nn.Parameter, old: nn.Parameter) -> None:
    new.__dict__.update(old.__dict__)  # what libraries hang on parameters, such as marks for weight decay
    share_hooks(old, new)


def _convert_grad(grad: Tensor, new: nn.Parameter, mesh: DeviceMesh | None, ranks: int) -> Tensor:
    """A gradient from before sharding: averaged over ``ranks``, of which those of ``mesh`` have terms, then split like
    its parameter."""
    if mesh is None:
        return grad.to(new.device)
    grad = grad.detach().clone()
    if isinstance(grad, DTensor) and isinstance(new, DTensor):
        grad = grad.redistribute(grad.device_mesh, new.placements[-grad.device_mesh.ndim :])
    if not grad.is_meta:
        dist.all_reduce(local_tensor(grad), group=axes_of(mesh).everyone)
    grad = grad / ranks
    return as_shard(grad, new) if isinstance(new, DTensor) else grad


def convert_state(value: Any, param: nn.Parameter) -> Any:
    """Optimizer state from before sharding: tensors of the parameter's shape are split like it."""
    if not isinstance(value, Tensor) or value.shape != param.shape or param.is_meta:
        return value
    return as_shard(value, param) if isinstance(param, DTensor) else value.to(param.device)


def distribute(
    value: Tensor, spec: ShardSpec, mesh: DeviceMesh | None, stage: int = 3, parallel: Parallel | None = None
) -> Tensor:
    """``value`` as the outward parameter, with rank 0's values: a DTensor; plain at stage 0 and on a lone rank."""
    if parallel is not None:
        return placed_on_both(distribute(shared_part(value, parallel), spec, parallel.ours), parallel)
    value = value.detach().contiguous()
    if mesh is None:
        return value
    placements = placements_of(spec.sharded, mesh, spec.dim)
    if stage == 0:
        # Distributed all the same: it brings rank 0's values to all ranks.
        return value if value.is_meta else distribute_tensor(value, mesh, placements).to_local()
    if value.is_meta:
        return local_rows(value, mesh, spec.sharded, value.device, spec.dim)
    return distribute_tensor(value, mesh, placements)
