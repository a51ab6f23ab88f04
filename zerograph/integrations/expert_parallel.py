"""Expert parallel for transformers: each rank has some experts of every layer, and is sent the tokens that chose these.

The ranks of an axis of experts have samples of their own. :func:`zerograph.backend` shards experts over the ranks that
have the same ones, and everything else over all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zerograph.core.arguments import require, require_kind
from zerograph.core.errors import UnsupportedError
from zerograph.integrations.routed_experts import register_experts, routed
from zerograph.sharding.parallel import let_experts_lie_on
from zerograph.sharding.shards import local_rows

__all__ = ["as_expert", "divide_experts", "register_experts", "routed"]


def divide_experts(model: nn.Module, axis: DeviceMesh) -> nn.Module:
    """Divide the experts of a model of transformers over ``axis``, in place; returns ``model``.

    All ranks of the job call this with equal models, before the model is compiled and before it has an optimizer.

    Args:
        model: with fused experts, as Mixtral, Qwen 3 MoE and others of transformers 5 have.
        axis: the last axis of a mesh of all ranks that train: ``init_device_mesh(device, (ranks // n, n),
            mesh_dim_names=("dp", "ep"))["ep"]``.

    Raises:
        ConfigError: ``model`` is no module or ``axis`` no mesh of one axis, or the experts of a layer do not divide by
            its ranks.
        UnsupportedError: ``model`` has no such experts.
    """
    require_kind(model, nn.Module, "divide_experts", "a model of transformers, before it is compiled")
    require_kind(axis, DeviceMesh, "divide_experts", 'the axis of the experts: mesh["ep"]')
    require(axis.ndim == 1, f"divide_experts got a mesh of {axis.ndim} axes", 'one axis of it: mesh["ep"]')
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]
    if not layers:
        raise UnsupportedError(
            f"{type(model).__name__} has no fused experts of transformers",
            "experts of other models: zerograph.integrations.expert_parallel.routed in their forward",
        )
    for layer in layers:
        for param in layer.parameters():
            _require_divided(param, axis, f"of {type(layer).__name__} ")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    name = f"experts over {axis.get_group().group_name}"
    ALL_EXPERTS_FUNCTIONS.register(name, _routed_over(axis))
    kinds = [_registered(layer) for layer in layers]
    for layer, kind in zip(layers, kinds, strict=True):
        layer._zg_experts = kind
        for attribute, param in list(layer.named_parameters(recurse=False)):
            setattr(layer, attribute, as_expert(param, axis))
        layer.config = copy.copy(layer.config)  # which other models may have, too
        layer.config._experts_implementation = name
    return model


def as_expert(param: Tensor, axis: DeviceMesh) -> nn.Parameter:
    """``param``, the parameter of all experts by their number, as one of which this rank keeps its own experts' part.

    Args:
        param: ``[experts, ...]``, the same on all ranks.
        axis: whose ranks divide the experts, in their order.

    Returns:
        A DTensor ``[Shard(0)]`` on ``axis``, for a module's forward to pass to :func:`routed`: ZeroGraph gives it this
        rank's part there, as a plain tensor.

    Raises:
        ConfigError: the experts do not divide by the ranks.
    """
    _require_divided(param, axis)
    let_experts_lie_on(axis)
    own = local_rows(param.detach(), axis, True, param.device)
    return nn.Parameter(own, requires_grad=param.requires_grad)


def _require_divided(param: Tensor, axis: DeviceMesh, owner: str = "") -> None:
    require(
        param.ndim > 0 and len(param) % axis.size() == 0,
        f"a parameter {owner}of shape {list(param.shape)} does not divide by experts over {axis.size()} ranks",
        "an axis of so many ranks that each has equally many experts",
    )


def _routed_over(axis: DeviceMesh) -> Callable[..., Tensor]:
    """The forward of a layer's experts, as transformers calls it."""
    group = axis.get_group()

    def forward(layer: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        names = _PARAMETERS[layer._zg_experts]
        if names != tuple(layer._parameters):
            raise UnsupportedError(
                f"{type(layer).__name__} has other parameters than those that were divided, {', '.join(names)}",
                "adapters of experts cannot be divided: give them to other layers",
            )
        params = [getattr(layer, name) for name in names]
        return routed(hidden_states, top_k_index, top_k_weights, params, layer._zg_experts, group)

    return forward


_PARAMETERS: dict[str, tuple[str, ...]] = {}
"""The parameters of each kind of experts."""


def _registered(layer: Any) -> str:
    """The name by which graphs know how the experts of ``layer`` compute: layers of one kind have one.

    Raises:
        UnsupportedError: what they compute has no name, or they have parameters that are no expert's.
    """
    inside = [name for name, _ in layer.named_parameters() if "." in name] + [name for name, _ in layer.named_buffers()]
    if inside:
        raise UnsupportedError(
            f"{type(layer).__name__} has {inside[0]}, which its experts share", "models of such experts are not divided"
        )
    name = "; ".join(f"{path}: {_described(module)}" for path, module in layer.named_modules())
    names = _PARAMETERS[name] = tuple(attribute for attribute, _ in layer.named_parameters(recurse=False))
    alike = copy.copy(layer)
    alike._parameters = {}
    alike = copy.deepcopy(alike)  # its children are none of the model's, whose forwards ZeroGraph follows

    def compute(tokens: Tensor, expert: Tensor, *parameters: Tensor) -> Tensor:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        own = copy.copy(alike)
        vars(own).update(zip(names, parameters, strict=True), num_experts=len(parameters[0]))
        once = tokens.new_ones(len(tokens), 1)
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](own, tokens, expert.unsqueeze(1), once)  # type: ignore[no-any-return]

    register_experts(name, compute)
    return name


def _described(module: nn.Module) -> str:
    told = {name: value for name, value in vars(module).items() if not name.startswith("_") and name not in _NO_FACTS}
    facts = {name: _fact(module, name, value) for name, value in sorted(told.items())}
    return f"{type(module).__module__}.{type(module).__qualname__} {facts}"


_NO_FACTS = ("training", "config")


def _fact(module: nn.Module, name: str, value: Any) -> Any:
    if callable(value) and not isinstance(value, nn.Module):
        known = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '<unnamed>')}"
        if "<" in known:
            raise UnsupportedError(
                f"{type(module).__name__}.{name} is {value!r:.80}, a function without a name",
                "make it a module, or a function of a module",
            )
        return known
    return value if isinstance(value, bool | int | float | str | None) else repr(value)
