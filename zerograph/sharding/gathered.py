"""Plain full parameters for a while: :func:`gathered`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zerograph.core.arguments import require_flag
from zerograph.core.errors import ShardingError
from zerograph.runtime import delayed
from zerograph.runtime.assigned import refuse_assigned
from zerograph.runtime.comm.axes import axes_named
from zerograph.runtime.comm.rendezvous import noticed
from zerograph.runtime.joined import everyone_on
from zerograph.sharding.adopt import model_given
from zerograph.sharding.module_classes import plain_class
from zerograph.sharding.shards import agree, default_group, full_value, local_of, send_from_first


@dataclass(frozen=True, slots=True)
class _Opened:
    """A parameter shown as a plain one: ``outward`` is sharded over ``group``, ``plain`` stands in for it, ``at`` says
    where."""

    name: str
    outward: nn.Parameter
    plain: nn.Parameter
    group: ProcessGroup | None
    at: list[tuple[nn.Module, str]]
    writeback: bool


# What is open now, in all models, by id(outward): nested contexts share the plain parameters. Empty outside of them.
_OPEN: dict[int, _Opened] = {}


@contextlib.contextmanager
def gathered(module: nn.Module, writeback: bool = False) -> Iterator[nn.Module]:
    """A context in which the parameters of ``module`` and its submodules are plain, full ``nn.Parameter`` objects.

    All ranks enter and leave together. Every rank holds the whole of ``module`` while inside, in the shards' dtype:
    give it the submodule that you need. Tied parameters stay tied. ``state_dict``, ``named_parameters``, in-place
    edits, ``torch.save`` and ``copy.deepcopy`` see an ordinary PyTorch module; calling it, compiled or not, computes on
    this rank alone. Gradients made inside, and changes of ``requires_grad``, are dropped.

    On leaving, the sharded parameters are back: the very objects that optimizers hold. When the body raises, nothing
    is written.

    Args:
        module: a sharded model, or a submodule of one.
        writeback: on leaving, write rank 0's values into the shards of all ranks; otherwise changes are dropped, on one
            process as well as on many.

    Raises:
        ConfigError: ``module`` is no module, or ``writeback`` no flag.
        ShardingError: with ``writeback``, a parameter was removed, untied, or changed its shape or dtype inside; or a
            nested ``writeback`` that an enclosing context would drop; or the ``.data`` of a parameter was assigned
            before.
    """
    module = model_given(module, "zerograph.gathered")
    require_flag("writeback", writeback, "one module is gathered; True writes rank 0's values into shards")
    delayed.settle(module.parameters())
    refuse_assigned(module.parameters())
    with noticed(group_of(module), "to gather parameters in zerograph.gathered()"):
        opened = _open(module, writeback)
    # Of a parameter that an enclosing context has opened this one is not the owner, and does not close it.
    mine = [o for o in opened if _OPEN.setdefault(id(o.outward), o) is o]
    try:
        with contextlib.ExitStack() as stack:
            owners = _by_owner(opened)
            for part in module.modules():
                stack.enter_context(shown(part, owners.get(part, {})))
            yield module
            # Looked up while the module still shows them: the user may have put other parameters in their places.
            values = [_values(o) for o in opened] if writeback else []
    finally:
        for o in mine:
            del _OPEN[id(o.outward)]
    if writeback:
        _write(module, opened, values)


@contextlib.contextmanager
def shown(module: nn.Module, params: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """``module`` as an instance of its own class that owns ``params``; afterwards as it was."""
    before = {name: module._parameters[name] for name in params}
    cls = type(module)
    # Without these it is copied and pickled as the plain module that it looks like.
    hidden = (*_OURS, "_flat_weights") if isinstance(module, nn.RNNBase) else _OURS
    kept = {attribute: module.__dict__.pop(attribute) for attribute in hidden if attribute in module.__dict__}
    module.__class__ = plain_class(module)
    module._parameters.update(params)
    if isinstance(module, nn.RNNBase):
        module.__dict__["_flat_weights"] = [getattr(module, name) for name in module._flat_weights_names]
    try:
        yield
    finally:
        module.__class__ = cls
        module._parameters.update(before)
        for attribute in hidden:
            module.__dict__.pop(attribute, None)
        module.__dict__.update(kept)


_OURS = ("_zg_specs", "_zg_parallel", "_zg_reads", "_zg_unsharded")
"""Attributes of sharded modules that say how their parameters are sharded."""


def group_of(model: nn.Module) -> ProcessGroup | None:
    """The ranks that ``model`` is sharded over, also where it is shown as plain, else those of the default group; None
    in a lone process."""
    shown_over = {id(o.plain): o.group for o in _OPEN.values()}
    for module in model.modules():
        for attribute, param in module._parameters.items():
            group = shown_over.get(id(param)) or _group_of(module, attribute)
            if group is not None:
                return group
    return default_group()


def _group_of(module: nn.Module, attribute: str) -> ProcessGroup | None:
    parallel = module.__dict__.get("_zg_parallel", {}).get(attribute)
    if parallel is not None:
        return everyone_on(parallel.both)  # type: ignore[no-any-return]
    spec = module.__dict__.get("_zg_specs", {}).get(attribute)
    return axes_named(spec.group).everyone if spec is not None and spec.group else None


def is_open(params: Iterable[Tensor]) -> bool:
    """Whether any of ``params`` is a stand-in that an open :func:`gathered` shows."""
    plain = {id(o.plain) for o in _OPEN.values()}
    return any(id(p) in plain for p in params)


def _open(module: nn.Module, writeback: bool) -> list[_Opened]:
    """Gather what ``module`` owns and no enclosing context shows already."""
    opened: dict[int, _Opened] = {}
    stand_ins = {id(o.plain): o for o in _OPEN.values()}
    for prefix, owner in module.named_modules():
        for attribute, param in owner._parameters.items():
            if param is None:
                continue
            name = f"{prefix}.{attribute}".lstrip(".")
            if id(param) in stand_ins:
                _refuse_dropped(name, writeback and not stand_ins[id(param)].writeback)
                continue
            if id(param) not in opened:
                spec = owner.__dict__.get("_zg_specs", {}).get(attribute)
                device = spec.device if spec is not None else None
                plain = _stand_in(name, param, writeback, device)
                opened[id(param)] = _Opened(name, param, plain, _group_of(owner, attribute), [], writeback)
            opened[id(param)].at.append((owner, attribute))
    return list(opened.values())


def _stand_in(name: str, param: nn.Parameter, writeback: bool, device: torch.device | None) -> nn.Parameter:
    enclosing = _OPEN.get(id(param))  # tied to a parameter that an enclosing context shows under another name
    if enclosing is not None:
        _refuse_dropped(name, writeback and not enclosing.writeback)
        return enclosing.plain
    if local_of(param).is_meta:
        raise ShardingError(
            f"parameter {name} is on the meta device and has no values", "call zerograph.materialize(model) first"
        )
    return nn.Parameter(full_value(param).to(device), requires_grad=param.requires_grad)


def _refuse_dropped(name: str, dropped: bool) -> None:
    if dropped:
        raise ShardingError(
            f"parameter {name} is shown by an enclosing gathered() that drops changes: it cannot be written",
            "give the outer gathered() writeback=True as well",
        )


def _by_owner(opened: list[_Opened]) -> dict[nn.Module, dict[str, nn.Parameter]]:
    owners: dict[nn.Module, dict[str, nn.Parameter]] = {}
    for o in opened:
        for owner, attribute in o.at:
            owners.setdefault(owner, {})[attribute] = o.plain
    return owners


def _values(o: _Opened) -> list[Tensor | None]:
    return list({id(p): p for p in (owner._parameters.get(name) for owner, name in o.at)}.values())


def _write(module: nn.Module, opened: list[_Opened], values: list[list[Tensor | None]]) -> None:
    """Rank 0's ``values`` into the shards of all ranks."""
    group = group_of(module)
    agree(group, lambda: _check_all(opened, values), ShardingError, first=True)
    for o, value in zip(opened, values, strict=True):
        send_from_first(value[0], local_of(o.outward), group, o.outward)
        torch.autograd.graph.increment_version(o.outward)  # what autograd saved before is stale


def _check_all(opened: list[_Opened], values: list[list[Tensor | None]]) -> None:
    for o, value in zip(opened, values, strict=True):
        _check(o, value)


def _check(o: _Opened, values: list[Tensor | None]) -> None:
    hint = "change what parameters there are, their shapes and ties before the model is sharded"
    if len(values) > 1:
        raise ShardingError(f"parameter {o.name} was tied to others and is no longer", hint)
    value = values[0]
    if value is None:
        raise ShardingError(f"parameter {o.name} was removed inside gathered()", hint)
    if value.shape != o.outward.shape or value.dtype != o.outward.dtype:
        raise ShardingError(
            f"parameter {o.name} became {list(value.shape)} {value.dtype} inside gathered(); it was "
            f"{list(o.outward.shape)} {o.outward.dtype}",
            hint,
        )
