"""Two faces of a parameter: a DTensor outward, the full plain tensor inward.

A module that owns sharded parameters becomes an instance of a generated subclass of its class, where each such
parameter is a property. ``self._parameters`` still holds the ``nn.Parameter`` (a DTensor, sharded by rows) that
optimizers, ``state_dict`` and ``named_parameters`` see; reading ``self.weight`` yields the full tensor through the
``zg::unshard`` marker.
"""

from __future__ import annotations

import copyreg
import functools
import itertools
import logging
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from zerograph.core.config import Config
from zerograph.core.errors import ConfigError, ShardingError, UnsupportedError
from zerograph.core.units import format_bytes
from zerograph.lent import refuse_lost_edits
from zerograph.reading import getter
from zerograph.sharding.adopt import modules_holding, move_to_one_mesh, one_mesh, replace_everywhere, skip_getters
from zerograph.sharding.optimizer_states import early_states, share, share_states
from zerograph.sharding.unsupported_modules import refuse_modules

log = logging.getLogger(__name__)


class Face(NamedTuple):
    """How the marker of one parameter is to be read; the constants that travel in the graph.

    Attributes:
        name: fully qualified name in the sharded model.
        group: name of the process group, empty at world size 1.
        dtype: dtype of the full tensor, for gather and compute.
        reduce_dtype: dtype of the gradient's reduction over ranks.
        sharded: split by rows over the ranks of ``group``, or whole on each.
    """

    name: str
    group: str
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    sharded: bool

    def computing_in(self, dtype: torch.dtype) -> Face:
        """The face of the same parameter in another compute dtype."""
        return self._replace(dtype=dtype, reduce_dtype=_default_reduce_dtype(dtype))


def _default_reduce_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 and dtype.is_floating_point else dtype


class Faced:
    """Mixin of generated module classes; its attributes describe the faces of this instance's parameters."""

    _zg_faces: Mapping[str, Face] = {}
    _zg_base: type[nn.Module]

    def __init_subclass__(cls, **options: Any) -> None:
        """Generated classes are none of the user's: no hook of theirs, which may want arguments, hears of one."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse what would leave optimizer and plan with a parameter that is no longer the module's.

        Pruning and parametrizations put a parameter, or a full copy that they read of it, under another name.
        """
        if name in self._zg_faces:
            raise _kept(self._zg_faces[name].name, "replaced")
        owned: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
        for attribute, face in self._zg_faces.items():
            if attribute not in owned:
                raise _kept(face.name, "removed")
            if param is not None and owned[attribute] is param:
                raise _kept(face.name, f"kept as {name} instead")
        if isinstance(param, Tensor) and not isinstance(param, nn.Parameter):
            raise _kept(" or ".join(face.name for face in self._zg_faces.values()), f"kept as {name} instead")
        super().register_parameter(name, param)  # type: ignore[misc]

    def __delattr__(self, name: str) -> None:
        if name in self._zg_faces:
            raise _kept(self._zg_faces[name].name, "removed")
        super().__delattr__(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """``module.to(dtype)`` and its like, which torch refuses for compiled DTensors (it wants to swap objects that
        Dynamo's guards refer to). What computes in a parameter's own dtype follows it.
        """
        params: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
        order = list(params)
        outward = {name: params.pop(name) for name in self._zg_faces}
        try:
            super()._apply(fn, recurse)  # type: ignore[misc]
        finally:
            everything = params | outward
            params.clear()
            params.update({name: everything[name] for name in order})
        for name, param in outward.items():
            face, dtype = self._zg_faces[name], param.dtype
            _set_values(param, fn(param.detach()), face)
            if face.dtype == dtype != param.dtype:
                self._zg_faces = {**self._zg_faces, name: face.computing_in(param.dtype)}
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept full plain tensors for sharded parameters: each rank takes its own rows."""
        for name in self._zg_faces:
            key, param = prefix + name, self._parameters[name]  # type: ignore[attr-defined]
            value = state_dict.get(key)
            if not isinstance(param, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
                continue
            if value.shape == param.shape:
                state_dict[key] = as_shard(value.to(param.device), param)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]

    def _save_to_state_dict(self, *args: Any) -> None:
        refuse_lost_edits()
        super()._save_to_state_dict(*args)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and deep-copy by base class: generated classes cannot be imported."""
        _, (_, *args), *rest = super().__reduce_ex__(2)  # type: ignore[misc, str-unpack]
        return (_rebuild, (self._zg_base, frozenset(self._zg_faces), *args), *rest)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        for name in self._zg_faces:
            move_to_one_mesh(self._parameters[name])  # type: ignore[attr-defined]


def _kept(name: str, done: str) -> ShardingError:
    return ShardingError(
        f"parameter {name} is sharded and cannot be {done}",
        "replace, prune or parametrize it before the model is sharded; "
        "change its values inside `with zerograph.gathered(module, writeback=True):`",
    )


def _set_values(param: nn.Parameter, values: Tensor, face: Face) -> None:
    """Let ``param`` stand for ``values``, maybe of another dtype, and stay the object that optimizers hold.

    Raises:
        ShardingError: the values lie on another kind of device, where no transport was opened.
    """
    if values.device.type != param.device.type and not param.is_meta:
        raise ShardingError(
            f"parameter {face.name} is sharded on {param.device.type} and cannot move to {values.device.type}",
            "move the model before its first call, or before zerograph.shard",
        )
    if values.dtype == param.dtype and values.device == param.device:
        if _memory(values) != _memory(param):
            param.detach().copy_(values)
        return
    grad, param.grad = param.grad, None
    param.data = values
    if isinstance(param, DTensor):
        param._local_tensor, param._spec = values._local_tensor, values._spec  # type: ignore[attr-defined]
    param.grad = grad.to(values.dtype) if grad is not None else None


def _memory(tensor: Tensor) -> int:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()


def _rebuild(base: type[nn.Module], names: frozenset[str], *args: Any) -> nn.Module:
    return copyreg.__newobj__(faced_class(base, names), *args)  # type: ignore[attr-defined, arg-type]


@functools.cache
def faced_class(base: type[nn.Module], names: frozenset[str]) -> type[nn.Module]:
    """Subclass of ``base`` in which the parameters ``names`` are properties that yield full tensors."""
    members: dict[str, Any] = {name: property(getter(name)) for name in sorted(names)}
    if issubclass(base, nn.RNNBase):
        # RNNs keep their parameters in a list as well, which would hold shards.
        members["_flat_weights"] = property(
            lambda self: [getattr(self, name) for name in self._flat_weights_names],
            lambda self, _: None,
        )
    members |= {"_zg_base": base, "__module__": base.__module__, "__qualname__": base.__qualname__}
    try:
        cls = type(base.__name__, (Faced, base), members)
    except TypeError as error:  # what metaclasses raise for classes that are not to be inherited from
        raise UnsupportedError(
            f"class {base.__qualname__} owns parameters and cannot be inherited from ({error}), "
            "as its sharded form must",
            "allow subclasses of it, or let a module inside of it own the parameters",
        ) from error
    skip_getters(cls)
    return cls


Places = list[tuple[nn.Module, str]]
"""Where a parameter lives: the modules that own it and the attribute in each."""


def shard_parameters(
    roots: Sequence[nn.Module],
    config: Config,
    mesh: DeviceMesh | None,
    objects: Sequence[Any],
    taken: Container[str] = (),
) -> dict[str, nn.Parameter]:
    """Give every parameter of ``roots`` its two faces, in place; returns the outward ones by name.

    All ranks call this together; values, and states of optimizers, are those of rank 0. Optimizers among ``objects``,
    and lists of parameters, that hold the old parameters hold the new ones afterwards. Parameters on the meta device
    become uninitialized shards on the meta device.

    Args:
        objects: all modules and optimizers of the process.

    Raises:
        UnsupportedError: a parameter that cannot be sharded, before anything was changed.
    """
    refuse_modules(roots, several_ranks=mesh is not None and mesh.size() > 1)
    named, places = _owned(roots, taken)
    _make_classes(places)
    faces = {name: face_of(param, name, config, mesh) for name, param in named.items()}
    _warn_of_few_rows(named, faces, mesh)
    new = {name: _new_parameter(param, faces[name], mesh, config.sharding) for name, param in named.items()}
    share_states(early_states(named, objects), mesh)
    for module in modules_holding(named.values(), objects):
        for attribute, param in module._parameters.items():
            if id(param) in places and (module, attribute) not in places[id(param)]:
                places[id(param)].append((module, attribute))
    for name, param in named.items():
        for module, attribute in places[id(param)]:
            present(module, attribute, new[name], faces[name])
    replace_everywhere({id(old): (old, new[name]) for name, old in named.items()}, convert_state, objects)
    _share_buffers(roots, mesh)
    return new


def _warn_of_few_rows(named: Mapping[str, nn.Parameter], faces: Mapping[str, Face], mesh: DeviceMesh | None) -> None:
    """Parameters are split by rows: say what that leaves whole, where it is more than scalars and small vectors."""
    if mesh is None or not any(face.sharded for face in faces.values()):
        return
    whole = {n: p.nbytes for n, p in named.items() if p.ndim > 1 and not faces[n].sharded}
    if sum(whole.values()) > sum(p.nbytes for p in named.values()) / 100:
        log.warning(
            "%d parameters with fewer rows than the %d ranks stay whole on each, %s: %s",
            len(whole), mesh.size(), format_bytes(sum(whole.values())), ", ".join(list(whole)[:3]),
        )  # fmt: skip


def _owned(roots: Sequence[nn.Module], taken: Container[str]) -> tuple[dict[str, nn.Parameter], dict[int, Places]]:
    """The parameters of ``roots`` that have no faces yet, by unique name, and where each lives."""
    named: dict[str, nn.Parameter] = {}
    places: dict[int, Places] = {}
    for root in roots:
        for prefix, module in root.named_modules():
            for attribute, param in module._parameters.items():
                if param is None or attribute in module.__dict__.get("_zg_faces", ()):
                    continue
                if id(param) not in places:
                    name = f"{prefix}.{attribute}".removeprefix("_orig_mod.").lstrip(".")
                    named[unique(name, named, taken)] = param
                if (module, attribute) not in places.setdefault(id(param), []):
                    places[id(param)].append((module, attribute))
    return named, places


def other_names(roots: Sequence[nn.Module], params: Mapping[str, nn.Parameter]) -> dict[str, tuple[str, ...]]:
    """Of each of ``params`` that its model has more than one name for: the other ones."""
    first = {id(param): name for name, param in params.items()}
    found: dict[str, tuple[str, ...]] = {}
    for root in roots:
        names: dict[str, list[str]] = {}
        for name, param in root.named_parameters(remove_duplicate=False):
            if id(param) in first:
                names.setdefault(first[id(param)], []).append(name.removeprefix("_orig_mod."))
        found |= {n: tuple(o for o in all_ if o != n) for n, all_ in names.items() if n in all_ and len(all_) > 1}
    return found


def _make_classes(places: Mapping[int, Places]) -> None:
    """Generate every class that will be needed, while an error changes nothing yet."""
    names: dict[nn.Module, set[str]] = {}
    for module, attribute in (place for where in places.values() for place in where):
        names.setdefault(module, set(module.__dict__.get("_zg_faces", ()))).add(attribute)
    for module, attributes in names.items():
        faced_class(getattr(module, "_zg_base", type(module)), frozenset(attributes))  # type: ignore[arg-type]


def unique(name: str, *used: Container[str]) -> str:
    candidates = itertools.chain([name], (f"{name}#{i}" for i in itertools.count(2)))
    return next(c for c in candidates if not any(c in names for names in used))


def _new_parameter(param: nn.Parameter, face: Face, mesh: DeviceMesh | None, stage: int) -> nn.Parameter:
    new = nn.Parameter(distribute(param, face, mesh, stage), requires_grad=param.requires_grad)
    if param.grad is not None:
        new.grad = _convert_grad(param.grad, new, mesh)
    new.__dict__.update(param.__dict__)
    new._backward_hooks = param._backward_hooks  # the very dict that the handles of hooks refer to
    if param._post_accumulate_grad_hooks is not None:
        new._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
    return new


def _convert_grad(grad: Tensor, new: nn.Parameter, mesh: DeviceMesh | None) -> Tensor:
    """A gradient from before sharding: averaged over ranks, then split like its parameter."""
    if mesh is None or mesh.size() == 1:
        return grad
    grad = grad.detach().clone()
    if not grad.is_meta:
        dist.all_reduce(grad, group=mesh.get_group())
    grad = grad / mesh.size()
    return as_shard(grad, new) if isinstance(new, DTensor) else grad


def convert_state(value: Any, param: nn.Parameter) -> Any:
    """Optimizer state from before sharding: tensors of the parameter's shape are split like it."""
    if isinstance(value, Tensor) and isinstance(param, DTensor) and value.shape == param.shape:
        return as_shard(value, param)
    return value


def _share_buffers(roots: Sequence[nn.Module], mesh: DeviceMesh | None) -> None:
    """Start all ranks from rank 0's buffers, as DistributedDataParallel does."""
    if mesh is None or mesh.size() == 1:
        return
    group = mesh.get_group()
    for buffer in dict.fromkeys(b for root in roots for b in root.buffers()):
        if not buffer.is_meta:
            share(buffer, group)


def face_of(param: Tensor, name: str, config: Config, mesh: DeviceMesh | None) -> Face:
    """The face ``param`` gets under ``config``; checks that it can be trained.

    Raises:
        UnsupportedError: complex or sparse parameters, or one that is sharded already by something else.
    """
    if isinstance(param, DTensor):
        raise UnsupportedError(
            f"parameter {name} is a DTensor already ({param.placements})",
            "give ZeroGraph the plain model; FSDP, tensor-parallel or already sharded ones are not supported",
        )
    if param.is_complex() or param.layout != torch.strided:
        kind = "complex" if param.is_complex() else str(param.layout)
        raise UnsupportedError(
            f"parameter {name} is {kind}, which ZeroGraph cannot shard",
            "store its real and imaginary parts as two real parameters, or make it dense",
        )
    floating = param.is_floating_point()
    dtype = config.dtype if config.dtype is not None and floating else param.dtype
    reduce_dtype = config.reduce_dtype
    if reduce_dtype is None:
        reduce_dtype = _default_reduce_dtype(dtype)
    world = mesh.size() if mesh is not None else 1
    sharded = config.sharding > 0 and world > 1 and param.ndim > 0 and param.shape[0] >= world
    group = mesh.get_group().group_name if mesh is not None and world > 1 else ""
    return Face(name, group, dtype, reduce_dtype if floating else dtype, sharded)


def distribute(value: Tensor, face: Face, mesh: DeviceMesh | None, stage: int = 3) -> Tensor:
    """``value`` as its outward face, started from rank 0's values: a DTensor; plain at stage 0 and world size 1."""
    value = value.detach().contiguous()
    if mesh is None or mesh.size() == 1:
        return value
    placement = Shard(0) if face.sharded else Replicate()
    if stage == 0:
        return value if value.is_meta else distribute_tensor(value, mesh, [placement]).to_local()
    return _local_rows(value, mesh, placement) if value.is_meta else distribute_tensor(value, mesh, [placement])


def as_shard(value: Tensor, like: DTensor) -> DTensor:
    """The rows of the full ``value`` that this rank holds of ``like``; no communication."""
    return _local_rows(value, like.device_mesh, like.placements[0])


def _local_rows(value: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    local = value
    if isinstance(placement, Shard):
        rows = -(-len(value) // mesh.size())
        local = value[mesh.get_local_rank() * rows :][:rows]
    local = local.contiguous() if local is value else local.clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=value.shape, stride=value.contiguous().stride()
    )


def present(module: nn.Module, name: str, param: nn.Parameter, face: Face) -> None:
    """Hold ``param`` as the outward face of ``module.name`` and turn the attribute into its inward face."""
    faces = {**module.__dict__.get("_zg_faces", {}), name: face}
    base = getattr(module, "_zg_base", type(module))
    module._parameters[name] = param
    module.__dict__["_zg_faces"] = faces
    module.__class__ = faced_class(base, frozenset(faces))  # type: ignore[arg-type]


def resolve_mesh(config: Config, device_type: str) -> DeviceMesh | None:
    """The mesh to shard over: the user's, or a 1-D one over the default process group; None without any group.

    Raises:
        ConfigError: the mesh lies on another device type than the model.
    """
    if config.mesh is not None:
        if config.mesh.device_type != device_type:
            raise ConfigError(
                f"mesh is on {config.mesh.device_type!r}, the model on {device_type!r}",
                f'make it with init_device_mesh("{device_type}", (world_size,))',
            )
        if config.mesh.get_coordinate() is None:
            raise ConfigError(
                f"rank {dist.get_rank()} is not in the mesh, which has ranks {config.mesh.mesh.flatten().tolist()}",
                "run the model only on ranks of its mesh, or make a mesh of all ranks",
            )
        return one_mesh(config.mesh)
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return one_mesh(dist.device_mesh.init_device_mesh(device_type, (dist.get_world_size(),)))
