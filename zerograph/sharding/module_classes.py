"""Classes of the modules of an adopted model: what their parameters are to the code that reads them.

Each module becomes an instance of a generated subclass of its class, which counts the forwards that run
(:mod:`~zerograph.sharding.forward`) and where each parameter of its own is a property. ``self._parameters`` holds the
``nn.Parameter`` (a DTensor, sharded by rows) that optimizers, ``state_dict`` and ``named_parameters`` see. Outside of a
forward ``self.weight`` is that one; inside, and in compiled code, it is the full tensor, through the ``zg::unshard``
marker.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor

from zerograph.core.errors import ShardingError, UnsupportedError
from zerograph.core.layout import folded
from zerograph.graph.ops import UNSHARD
from zerograph.graph.torch_private import skip_frame
from zerograph.runtime import delayed
from zerograph.runtime.assigned import refuse_assigned, remember
from zerograph.runtime.dtensors import unfolded
from zerograph.runtime.executor.uncompiled import UncompiledReads
from zerograph.runtime.torch_private import local_tensor
from zerograph.sharding.adopt import move_to_one_mesh, skip_getters
from zerograph.sharding.foreign_code import explained_methods
from zerograph.sharding.forward import count_own_forward, counting, inside
from zerograph.sharding.parallel import Parallel
from zerograph.sharding.shards import as_shard
from zerograph.sharding.spec import ShardSpec
from zerograph.sharding.torch_private import compiles_calls, original, set_shard
from zerograph.sharding.uncompiled import read_uncompiled
from zerograph.sharding.unsharded import before_reading


class ShardedModule:
    """Mixin of generated module classes; its attributes say how this instance's parameters are sharded."""

    _zg_specs: Mapping[str, ShardSpec] = {}
    _zg_reads: UncompiledReads | None = None
    _zg_unsharded: Mapping[str, Tensor] = {}
    _zg_parallel: Mapping[str, Parallel] = {}
    _zg_base: type[nn.Module]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance of the user's class: nobody has sharded a module that is made by ``type(module)(...)``."""
        return cls._zg_base(*args, **kwargs)

    def __init_subclass__(cls, **options: Any) -> None:
        """Generated classes are none of the user's: no hook of theirs, which may want arguments, hears of one."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse what would leave optimizer and plan with a parameter that is no longer the module's.

        Pruning and parametrizations put a parameter, or a full copy that they read of it, under another name.
        """
        owned: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
        if name in self._zg_specs:
            if param is owned.get(name):
                return  # as who ties weights again sets them
            raise _refusal(self._zg_specs[name].name, "replaced")
        for attribute, spec in self._zg_specs.items():
            if attribute not in owned:
                raise _refusal(spec.name, "removed")
            if param is not None and owned[attribute] is param:
                raise _refusal(spec.name, f"kept as {name} instead")
        if self._zg_specs and isinstance(param, Tensor) and not isinstance(param, nn.Parameter):
            raise _refusal(" or ".join(spec.name for spec in self._zg_specs.values()), f"kept as {name} instead")
        super().register_parameter(name, param)  # type: ignore[misc]

    def __delattr__(self, name: str) -> None:
        if name in self._zg_specs:
            raise _refusal(self._zg_specs[name].name, "removed")
        super().__delattr__(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """``module.to(dtype)`` and its like, which torch refuses for compiled DTensors (it wants to swap objects that
        Dynamo's guards refer to). Programs that compute in a parameter's own dtype follow it.
        """
        params: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
        order = list(params)
        # Known by its name: a method share_memory() here would not be that of a model around this module.
        if self._zg_specs and getattr(fn, "__qualname__", "").startswith(f"{nn.Module.share_memory.__qualname__}."):
            raise ShardingError(
                f"parameter {next(iter(self._zg_specs.values())).name} is sharded and cannot move to shared memory",
                "write the full model with zerograph.export(model, path), and read that in the other process",
            )
        self._zg_settle()
        # Out of torch's sight meanwhile: it would replace these parameters, or refuse to.
        outward = {name: params.pop(name) for name in self._zg_specs}
        try:
            # Classes that override it (torchmetrics) may take other arguments behind the first.
            super()._apply(fn, **({} if recurse else {"recurse": False}))  # type: ignore[misc]
        finally:
            # Also when `fn` fails, and in the old order, which state dicts and optimizers go by.
            everything = params | outward
            params.clear()
            params.update({name: everything[name] for name in order})
        for name, param in outward.items():
            spec = self._zg_specs[name]
            _set_values(param, _converted(param, fn, spec), spec)
            # A tied parameter has the new dtype already when its second module comes.
            if spec.follows and spec.dtype != param.dtype:
                self._zg_specs = {**self._zg_specs, name: spec.computing_in(param.dtype)}
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept full plain tensors for sharded parameters: each rank takes its own rows."""
        self._zg_settle()
        for name in self._zg_specs:
            key, param = prefix + name, self._parameters[name]  # type: ignore[attr-defined]
            value = state_dict.get(key)
            if not isinstance(param, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
                continue
            if value.shape == param.shape:
                # Into the dict itself: torch's loading, with its hooks and strictness, then goes on as ever.
                state_dict[key] = as_shard(value.to(param.device), param)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]

    def _save_to_state_dict(self, *args: Any) -> None:
        """After an update that is under way."""
        self._zg_settle()
        refuse_assigned(p for p in self._parameters.values() if p is not None)  # type: ignore[attr-defined]
        super()._save_to_state_dict(*args)  # type: ignore[misc]

    def _zg_settle(self) -> None:
        delayed.settle(p for p in self._parameters.values() if p is not None)  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and deep-copy by base class: generated classes cannot be imported."""
        self._zg_settle()
        # Protocol 2 names the class as the first argument of `__newobj__`, where it can be exchanged.
        _, (_, *args), *rest = super().__reduce_ex__(2)  # type: ignore[misc, str-unpack]
        parallel = frozenset(self._zg_parallel)
        return (_rebuild, (self._zg_base, frozenset(self._zg_specs), _is_routed(self), parallel, *args), *rest)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self._zg_share_mesh()

    def _zg_share_mesh(self) -> None:
        """A copy's parameters lie on the mesh of the others, not on a copy of it."""
        for name in self._zg_specs:
            move_to_one_mesh(self._parameters[name])  # type: ignore[attr-defined]
        remember(self._parameters[name] for name in self._zg_specs)  # type: ignore[attr-defined]


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """The copy that a class of the user's, or torch's parametrized ones, makes in its own way: it asks for another
    instance of its class, which a generated one does not give."""
    self._zg_settle()
    cls, base = type(self), self._zg_base
    self.__class__ = base
    try:
        copied = base.__deepcopy__(self, memo)
    finally:
        self.__class__ = cls
    if type(copied) is base and copied.__dict__.get("_zg_specs") == self.__dict__.get("_zg_specs"):
        copied.__class__ = cls
        copied._zg_share_mesh()
    return copied


def _refusal(name: str, done: str) -> ShardingError:
    return ShardingError(
        f"parameter {name} is sharded and cannot be {done}",
        "replace, prune or parametrize it before the model is sharded; "
        "change its values inside `with zerograph.gathered(module, writeback=True):`",
    )


def _converted(param: nn.Parameter, fn: Callable[[Tensor], Tensor], spec: ShardSpec) -> Tensor:
    """The result of ``fn``, which converts or moves tensors, for ``param``.

    One on the host of an accelerator stays there, and ``fn`` may not move what it computes on: ``model.cuda()`` does
    nothing to it.

    Raises:
        ShardingError: it would compute elsewhere.
    """
    if spec.device is None:
        return fn(param.detach())
    asked = fn(torch.empty(0, dtype=param.dtype, device=spec.device))
    if asked.device.type != spec.device.type:
        raise _stays(spec, spec.device, asked.device)
    return param.detach().to(asked.dtype)


def _stays(spec: ShardSpec, own: torch.device, wanted: torch.device) -> ShardingError:
    return ShardingError(
        f"parameter {spec.name} is sharded on {own.type} and cannot move to {wanted.type}",
        "move the model before its first call, or before zerograph.shard",
    )


def _set_values(param: nn.Parameter, values: Tensor, spec: ShardSpec) -> None:
    """Let ``param`` stand for ``values``, maybe of another dtype, and stay the object that optimizers hold.

    Raises:
        ShardingError: the values lie on another kind of device, where no transport was opened.
    """
    if values.device.type != param.device.type and not param.is_meta:
        raise _stays(spec, param.device, values.device)
    if values.dtype == param.dtype and values.device == param.device:
        if _memory(values) != _memory(param):
            param.detach().copy_(values)
        return
    # torch checks a gradient's dtype against its parameter's, so there must be none while that changes.
    grad, param.grad = param.grad, None
    param.data = values
    if isinstance(param, DTensor):
        set_shard(param, values)  # type: ignore[arg-type]  # placed as it was
    param.grad = grad.to(values.dtype) if grad is not None else None


def _memory(tensor: Tensor) -> int:
    return local_tensor(tensor).data_ptr()


def _rebuild(
    base: type[nn.Module], names: frozenset[str], routed: bool, parallel: frozenset[str], *args: Any
) -> nn.Module:
    module = copyreg.__newobj__(base, *args)  # type: ignore[attr-defined]
    module.__class__ = sharded_class(base, names, routed, parallel)  # type: ignore[arg-type]
    return module  # type: ignore[no-any-return]


def _getter(name: str) -> Any:
    """The getter of the generated property ``name`` of a sharded module."""

    def read(self: Any) -> Tensor | None:
        # Dynamo takes this for a constant: its graph has the marker, and no branch.
        if is_compiling():
            return unshard(self._parameters[name], self._zg_specs[name])
        return _read(self, name, compiles_calls()) if inside() else self._parameters[name]

    return read


def _routed_getter(name: str) -> Any:
    """The same where forwards may run inside of which parameters are unsharded
    (:mod:`~zerograph.sharding.unsharded`)."""

    def read(self: Any) -> Tensor | None:
        if is_compiling():
            full, param, spec = self._zg_unsharded, self._parameters[name], self._zg_specs[name]
            return unfolded(full[name], param.shape, spec.dim) if name in full else unshard(param, spec)
        return _read(self, name, compiles_calls()) if inside() else self._parameters[name]

    return read


def _parallel_getter(name: str) -> Any:
    """The same of a parameter that lies on another axis too (:mod:`~zerograph.sharding.parallel`)."""

    def read(self: Any) -> Tensor | None:
        if is_compiling():
            parallel, full, spec = self._zg_parallel[name], self._zg_unsharded, self._zg_specs[name]
            if name in full:
                return parallel.inward(unfolded(full[name], parallel.part, spec.dim))  # type: ignore[no-any-return]
            return unshard_parallel(self._parameters[name], spec, parallel)
        return _read(self, name, compiles_calls()) if inside() else self._parameters[name]

    return read


def unshard(param: Tensor, spec: ShardSpec) -> Tensor:
    """The full tensor of ``param``, in ``spec.dtype``; its gradient arrives averaged over ranks."""
    if isinstance(param, DTensor):
        return _unsharded(param.to_local(), param.shape, spec)
    if (spec.sharded and spec.group) or not isinstance(param, nn.Parameter):
        return param  # swapped in by torch.func.functional_call or inside zerograph.gathered
    return UNSHARD(param, list(param.shape), *spec.constants)


def _unsharded(local: Tensor, shape: Sequence[int], spec: ShardSpec) -> Tensor:
    ranks = shape[spec.dim] // local.shape[spec.dim] if spec.dim else 1
    return unfolded(UNSHARD(local, folded(shape, spec.dim, ranks), *spec.constants), shape, spec.dim)


skip_frame(_unsharded)


skip_frame(unshard)


def unshard_parallel(param: Tensor, spec: ShardSpec, parallel: Parallel) -> Tensor:
    """The same of a parameter that lies on another axis too: a DTensor of that axis, where the model computes so."""
    if not isinstance(param, DTensor) or param.device_mesh.ndim == parallel.mesh.ndim:
        return param  # swapped in by torch.func.functional_call or inside zerograph.gathered
    return parallel.inward(_unsharded(param.to_local(), parallel.part, spec))


skip_frame(unshard_parallel)


@torch.compiler.disable
def _read(module: ShardedModule, name: str, compiles: bool) -> Tensor:
    before_reading(compiles)
    param: nn.Parameter = module._parameters[name]  # type: ignore[attr-defined]
    parallel = module._zg_parallel.get(name)
    if name in module._zg_unsharded and id(param) in module._zg_reads.known:  # type: ignore[union-attr]
        spec = module._zg_specs[name]
        full = unfolded(module._zg_unsharded[name], param.shape if parallel is None else parallel.part, spec.dim)
    else:
        full = read_uncompiled(param, module._zg_specs[name], module._zg_reads, parallel)
    return full if parallel is None or isinstance(full, DTensor) else parallel.inward(full)


@functools.cache
def sharded_class(
    base: type[nn.Module], names: frozenset[str], routed: bool = False, parallel: frozenset[str] = frozenset()
) -> type[nn.Module]:
    """Subclass of ``base`` that counts its forwards, and in which the parameters ``names`` are properties.

    Args:
        routed: whether forwards may run inside of which parameters are unsharded.
        parallel: those of ``names`` that lie on another axis too.
    """
    getter = _routed_getter if routed else _getter
    members: dict[str, Any] = {name: property(getter(name)) for name in sorted(names)}
    members |= {name: property(_parallel_getter(name)) for name in sorted(parallel)}
    if issubclass(base, nn.RNNBase):
        # RNNs keep their parameters in a list as well, which would hold shards.
        members["_flat_weights"] = property(
            lambda self: [getattr(self, name) for name in self._flat_weights_names],
            lambda self, _: None,
        )
    if _has_forward(base):
        members["forward"] = counting(base)
    if hasattr(base, "__deepcopy__"):
        members["__deepcopy__"] = _deepcopy
    members |= explained_methods(base)
    members |= {"_zg_base": base, "__module__": base.__module__, "__qualname__": base.__qualname__}
    try:
        cls = type(base.__name__, (ShardedModule, base), members)
    except TypeError as error:  # what metaclasses raise for classes that are not to be inherited from
        raise UnsupportedError(
            f"class {base.__qualname__} is part of the model and cannot be inherited from ({error}), "
            "as its sharded form must",
            "allow subclasses of it, or let a module outside of the model do its work",
        ) from error
    skip_getters(cls)
    _let_layers_checkpoint(cls)
    return cls


def _let_layers_checkpoint(cls: type[nn.Module]) -> None:
    """Let ``gradient_checkpointing_enable()`` of transformers find the layers.

    Since 5.23 a hook of theirs for subclasses wraps ``forward``, and only the wrapper of the layer's own class
    checkpoints. Hooks in general are not called (:meth:`ShardedModule.__init_subclass__`).
    """
    layers = getattr(sys.modules.get("transformers.modeling_layers"), "GradientCheckpointingLayer", None)
    if layers is not None and issubclass(cls, layers) and "__init_subclass__" in vars(layers):
        vars(layers)["__init_subclass__"].__func__(cls)


def _has_forward(base: type[nn.Module]) -> bool:
    """Whether calls of ``base`` run a function of its own: ``nn.ModuleList`` has none."""
    static = isinstance(inspect.getattr_static(base, "forward", None), staticmethod)
    return base.forward is not nn.Module.forward and inspect.isfunction(base.forward) and not static


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The user's class of ``module``: its own, or the one that its generated class inherits from."""
    cls = type(module)
    return getattr(cls, "_zg_base", cls)


def generate_classes(roots: Iterable[nn.Module], reads: UncompiledReads | None = None) -> None:
    """Make every module of ``roots`` an instance of a generated class, whose parameters uncompiled code ``reads``."""
    for module in own_modules(roots):
        if reads is not None:
            module.__dict__["_zg_reads"] = reads
        generate_class(module)


def generate_class(module: nn.Module) -> None:
    """Make ``module`` an instance of a generated class, for the parameters of it that are sharded."""
    count_own_forward(module)
    module.__class__ = class_of(module, module.__dict__.get("_zg_specs", ()))


def own_modules(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules whose Python code runs: not torch.compile's wrappers, whose modules follow, nor what was scripted."""
    modules = dict.fromkeys(module for root in roots for module in root.modules())
    return [m for m in modules if original(m) is m and not isinstance(m, torch.jit.ScriptModule)]


def class_of(module: nn.Module, names: Iterable[str]) -> type[nn.Module]:
    base, counts = plain_class(module), not isinstance(module, fx.GraphModule) and _has_forward(plain_class(module))
    if not names and not counts:
        return base
    parallel = frozenset(module.__dict__.get("_zg_parallel", ()))
    return sharded_class(base, frozenset(names), _is_routed(module), parallel)  # type: ignore[arg-type]


def _is_routed(module: Any) -> bool:
    reads = module.__dict__.get("_zg_reads")
    return reads is not None and bool(reads.routes)


def present(
    module: nn.Module, name: str, param: nn.Parameter, spec: ShardSpec, parallel: Parallel | None = None
) -> None:
    """Hold ``param`` as the outward parameter ``module.name``; inside of a forward the attribute is the full tensor."""
    module._parameters[name] = param
    module.__dict__["_zg_specs"] = {**module.__dict__.get("_zg_specs", {}), name: spec}
    if parallel is not None:
        module.__dict__["_zg_parallel"] = {**module.__dict__.get("_zg_parallel", {}), name: parallel}
    generate_class(module)
