"""Copies of models: a backend takes over what another one sharded; averages of a model are sharded as it is."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zerograph.core.config import Config
from zerograph.core.errors import ShardingError, UnsupportedError
from zerograph.runtime.torch_private import local_tensor, placed_as
from zerograph.sharding.adopt import replace_everywhere
from zerograph.sharding.module_classes import generate_classes, present
from zerograph.sharding.parametrization import convert_state, distribute, unique
from zerograph.sharding.ranks import Ranks
from zerograph.sharding.spec import ShardSpec, spec_of
from zerograph.sharding.torch_private import original


def take_over(
    roots: Sequence[nn.Module], config: Config, ranks: Ranks, mine: Mapping[str, nn.Parameter]
) -> dict[str, nn.Parameter]:
    """The sharded parameters of ``roots`` that are not in ``mine``, by unique name: deep copies and unpickled models.

    Raises:
        UnsupportedError: they are sharded in another way than ``config`` asks for.
    """
    known = {id(param) for param in mine.values()}
    taken: dict[int, tuple[ShardSpec, nn.Parameter]] = {}
    for specs, attribute, param in _specs_of(roots):
        if id(param) in known:
            continue
        if id(param) not in taken:
            spec = _checked(specs[attribute], param, config, ranks)
            used = {f.name for f, _ in taken.values()}
            taken[id(param)] = (spec._replace(name=unique(spec.name, used, mine)), param)
        specs[attribute] = taken[id(param)][0]
    return {spec.name: param for spec, param in taken.values()}


def sharded_parameters(roots: Sequence[nn.Module]) -> list[nn.Parameter]:
    """What is sharded of ``roots``, by whichever backend."""
    return [param for _, _, param in _specs_of(roots)]


def _specs_of(roots: Sequence[nn.Module]) -> Iterator[tuple[dict[str, ShardSpec], str, nn.Parameter]]:
    for module in dict.fromkeys(m for root in roots for m in root.modules()):
        specs = module.__dict__.get("_zg_specs", {})
        for attribute in specs:
            param = module._parameters[attribute]
            if param is not None:
                yield specs, attribute, param


def _checked(spec: ShardSpec, param: nn.Parameter, config: Config, ranks: Ranks) -> ShardSpec:
    """``spec``, with what another ``config`` says to a change of the parameter's dtype."""
    # `spec_of` refuses DTensors: asked of a plain stand-in, it says what this backend would do.
    plain = torch.empty(param.shape, dtype=param.dtype, device="meta")
    wanted = spec_of(plain, spec.name, config, ranks.mesh)
    if ranks.host is not None:
        wanted = wanted._replace(device=spec.device)  # the first plan moves what has to
    spec = spec._replace(follows=wanted.follows, keeps_reduce_dtype=wanted.keeps_reduce_dtype)
    if wanted != spec:
        differing = [f for f in ShardSpec._fields if getattr(wanted, f) != getattr(spec, f)]
        raise UnsupportedError(
            f"parameter {spec.name} was sharded by another backend with {_settings(spec, differing)}; "
            f"this one needs {_settings(wanted, differing)}",
            "give the copy's backend the arguments of the original's, or load the values into a plain model: "
            "zerograph.export(model, path)",
        )
    return spec


def _settings(spec: ShardSpec, fields: list[str]) -> str:
    return ", ".join(f"{field}={getattr(spec, field)!r}" for field in fields)


_UPDATES = ("update_parameters", "update", "set")
"""Methods that take an average's model: of ``AveragedModel``, and of timm's ``ModelEmaV2`` and ``ModelEmaV3``, which
many projects have a copy of."""


def await_updates(roots: Sequence[nn.Module], objects: Iterable[Any]) -> None:
    """Mark the averages among ``objects`` that may have been made of ``roots`` while these were plain.

    Such an average is sharded when it is first updated: only then is it certain which model it belongs to.
    """
    averages = [o for o in objects if _is_average(o) and not isinstance(o, _Waiting)]
    sharded = {_shapes(module) for root in roots for module in root.modules()} if averages else set()
    for average in averages:
        if _shapes(average.module) in sharded and not any(True for _ in _specs_of([average])):
            average.__class__ = _waiting(type(average))  # type: ignore[arg-type]


def _is_average(candidate: Any) -> TypeGuard[_Average]:
    """Whether it keeps a model as its child ``module``, and has a method that takes another one's values."""
    if not isinstance(candidate, nn.Module) or not any(hasattr(type(candidate), name) for name in _UPDATES):
        return False
    children = candidate.__dict__.get("_modules")  # which TorchScript's modules have in a class of their own
    return isinstance(children, dict) and isinstance(children.get("module"), nn.Module)


def _shapes(model: nn.Module) -> frozenset[tuple[str, torch.Size]]:
    return frozenset((name.removeprefix("_orig_mod."), param.shape) for name, param in model.named_parameters())


class _Average(nn.Module):
    module: nn.Module


class _Waiting:
    """Mixin of averages whose model was sharded after they were made."""

    _zg_base: type[_Average]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and deep-copy by base class: generated classes cannot be imported."""
        _, (_, *args), *rest = super().__reduce_ex__(2)  # type: ignore[misc, str-unpack]
        return (_rebuild_waiting, (self._zg_base, *args), *rest)


@functools.cache
def _waiting(base: type[_Average]) -> type[_Average]:
    names = {"_zg_base": base, "__module__": base.__module__, "__qualname__": base.__qualname__}
    updates = {name: _sharding_first(name) for name in _UPDATES if hasattr(base, name)}
    return type(base.__name__, (_Waiting, base), names | updates)


def _sharding_first(name: str) -> Callable[..., Any]:
    def update(average: Any, *args: Any, **options: Any) -> Any:
        """Shard the average as the model that is given is, if it is, and update it. All ranks together."""
        for model in (a for a in (*args, *options.values()) if isinstance(a, nn.Module)):
            shard_alike(average.module, model)
        average.__class__ = average._zg_base
        return getattr(average, name)(*args, **options)

    return update


def _rebuild_waiting(base: type[_Average], *args: Any) -> nn.Module:
    return copyreg.__newobj__(_waiting(base), *args)  # type: ignore[attr-defined, no-any-return, arg-type]


@torch.inference_mode(False)  # as in Backend.shard
def shard_alike(copy: nn.Module, model: nn.Module) -> None:
    """Shard ``copy``, which is plain, in place as ``model`` is; from rank 0's values. Collective.

    Raises:
        UnsupportedError: ``model`` lies on an axis of tensor parallelism.
        ShardingError: ``copy`` lacks a parameter of ``model``, or has it in another shape or on another device.
    """
    copy, model = original(copy), original(model)
    if any(module.__dict__.get("_zg_parallel") for module in model.modules()):
        raise UnsupportedError(
            "an average that was made before its model was sharded cannot follow one that is tensor parallel",
            "make the average after the model's first call, or after zerograph.shard",
        )
    places: list[tuple[nn.Module, str, ShardSpec, DTensor]] = [
        (copy.get_submodule(prefix), attribute, spec, param)
        for prefix, module in model.named_modules()
        for attribute, spec in module.__dict__.get("_zg_specs", {}).items()
        if isinstance(param := module._parameters[attribute], DTensor)  # others are plain, as the copy's are
    ]
    for owner, attribute, spec, param in places:
        _check_alike(owner._parameters.get(attribute), param, spec)
    new: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for owner, attribute, spec, param in places:
        plain = owner._parameters[attribute]
        assert plain is not None  # it was checked
        if id(plain) not in new:
            rows = distribute(plain, spec, param.device_mesh)
            rows = placed_as(local_tensor(rows).to(param.device), param)  # an average is where its model is
            new[id(plain)] = (plain, nn.Parameter(rows, requires_grad=plain.requires_grad))
        present(owner, attribute, new[id(plain)][1], spec)
    if new:
        generate_classes([copy], model.__dict__.get("_zg_reads"))
        replace_everywhere(new, convert_state)


def _check_alike(plain: nn.Parameter | None, param: DTensor, spec: ShardSpec) -> None:
    wanted = f"{list(param.shape)} on {(spec.device or param.device).type}"
    found = "nothing" if plain is None else f"{list(plain.shape)} on {plain.device.type}"
    if wanted != found:
        raise ShardingError(
            f"parameter {spec.name} of the model is {wanted}, and {found} in the copy that is to be sharded alike",
            "make the copy after the model's first call, on the model's own device",
        )
