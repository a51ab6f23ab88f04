"""Accelerate: :class:`Accelerator` shards with ZeroGraph where ``accelerate.Accelerator`` wraps in DDP.

To Accelerate's code an instance looks like one with an FSDP2 plugin: checkpoints are written and read by Accelerate's
own functions for that, in its formats, which hold for any sharded model whose parameters are DTensors.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, DynamoBackend, FullyShardedDataParallelPlugin
from torch import Tensor, nn

import zerograph
from zerograph.api import Backend, refuse_other_backends
from zerograph.core.arguments import require
from zerograph.core.errors import ConfigError, UnsupportedError
from zerograph.integrations.models import compile_call, held_back, require_parallel
from zerograph.runtime.executor import late_gradients
from zerograph.sharding.forward import count_own_forward
from zerograph.sharding.module_classes import ShardedModule


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` whose models are sharded, and compiled, by a ZeroGraph backend.

    Models and optimizers may be prepared together or one by one, in any order.

    Args:
        backend: made by ``zerograph.backend(...)``; further models get a copy each, and with a ``parallelism_config``
            the first one does, too (``zerograph.backend_of(model)``).
        state_dict_type: how ``save_state`` writes, as for ``FullyShardedDataParallelPlugin``: "SHARDED_STATE_DICT"
            (each rank its shards) or "FULL_STATE_DICT" (rank 0 one file each of weights and optimizer states).
        arguments: those of ``accelerate.Accelerator``.

    Raises:
        ConfigError: an argument would make Accelerate distribute or compile the model itself.
    """

    def __init__(
        self, *arguments: Any, backend: Backend, state_dict_type: str = "SHARDED_STATE_DICT", **options: Any
    ) -> None:
        _refuse_arguments(**options)
        super().__init__(*arguments, **options)
        self._shard_with(backend, state_dict_type)

    @classmethod
    def of(cls, plain: accelerate.Accelerator, backend: Backend, state_dict_type: str) -> Accelerator:
        """Make ``plain``, which has prepared nothing yet, an instance of this class; for whoever cannot choose it."""
        plain.__class__ = cls
        assert isinstance(plain, cls)
        plain._shard_with(backend, state_dict_type)
        return plain

    def _shard_with(self, backend: Backend, state_dict_type: str) -> None:
        refuse_other_backends(backend, "Accelerator")
        require(
            state_dict_type in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"),
            f'state_dict_type must be "SHARDED_STATE_DICT" or "FULL_STATE_DICT", got {state_dict_type!r:.80}',
            "sharded ones are written by all ranks, full ones by rank 0",
        )
        _refuse_others(self)
        self._given_backend = self._next_backend = _on_axes(backend, self)
        self.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=state_dict_type)

    @property
    def distributed_type(self) -> DistributedType:
        """FSDP, by which Accelerate saves and loads. Its collectives go by that of ``state``, which stays as it is."""
        return DistributedType.FSDP

    @property
    def is_fsdp2(self) -> bool:
        return True

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As Accelerate prepares for DDP: it would want FSDP2's model and optimizer in one call."""
        places: tuple[bool | None, ...] = tuple(device_placement or ()) or (None,) * len(args)
        # Twice, as Accelerate does: schedulers need the prepared optimizers.
        for first_pass in (True, False):
            args = tuple(
                self._prepare_one(obj, first_pass=first_pass, device_placement=place)
                for obj, place in zip(args, places, strict=True)
            )
        for held in (self._dataloaders, self._models, self._optimizers, self._schedulers):
            for obj in held:
                obj._is_accelerate_prepared = True
        return args if len(args) > 1 else args[0]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard and compile ``model`` in place; also for evaluation, since a model has one set of parameters."""
        if not getattr(model, "_is_accelerate_prepared", False):
            _require_parallel(model, self)
            if self.device_placement if device_placement is None else device_placement:
                model.to(self.device)
            backend, self._next_backend = self._next_backend, copy.copy(self._given_backend)
            zerograph.shard(model, backend)
            compile_call(model, backend)
            generate_in_step(model)
        # As for evaluation: for training Accelerate would wrap the model in DDP.
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """As Accelerate's, which without ``keep_fp32_wrapper`` takes off every wrapper of the forward, ours too."""
        unwrapped: nn.Module = super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
        if not keep_fp32_wrapper and isinstance(unwrapped, ShardedModule):
            count_own_forward(unwrapped)
        return unwrapped

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """As Accelerate's; tied parameters share one tensor, as in a plain model, so that files hold it once.

        Each name was gathered by itself, and transformers looks at memory to know which tensors are tied.
        """
        state: dict[str, Any] = super().get_state_dict(model, unwrap)
        first: dict[nn.Parameter, str] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            kept = first.setdefault(param, name)
            if name in state and kept in state:
                state[name] = state[kept]
        return state

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with held_back(zerograph.backend_of(model)):
            yield

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        if zerograph.backend_of(model).config.sharding < 2:
            raise UnsupportedError(
                "trigger_sync_in_backward knows DistributedDataParallel only",
                "leave no_sync() before the backward that is to reduce, or use stage 2 or 3, where each does",
            )
        yield

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """As Accelerate's; the norm that is returned is a plain tensor, the same on all ranks."""
        self.unscale_gradients()
        return zerograph.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        self.unscale_gradients()
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        late_gradients.complete(params)
        torch.nn.utils.clip_grad_value_(params, clip_value)


def generate_in_step(model: nn.Module) -> None:
    """Let transformers' ``generate`` go on until all ranks are done, since each gathers with all, and not compile it:
    its cache has another length for every token."""
    generating: list[Any] = [module for module in model.modules() if hasattr(type(module), "generate")]
    if generating:
        # PEFT's passes all arguments on to transformers' inside of it; a user's own may know none of these.
        outer, *_ = arguments = [inspect.signature(type(module).generate).parameters for module in generating]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in outer.values())
        goes_on = any("synced_gpus" in each for each in (arguments if takes_any else [outer]))
        # Not a bound method: a copy of the model then has one of itself.
        model.__dict__["generate"] = functools.partial(_generate, generating[0], goes_on)


def _generate(module: Any, goes_on: bool, *args: Any, **options: Any) -> Any:
    # Its own default asks for a mark of FSDP's, at which Dynamo breaks graphs.
    if goes_on and options.get("synced_gpus") is None:
        options["synced_gpus"] = dist.is_initialized() and dist.get_world_size() > 1
    with torch.compiler.set_stance("force_eager"):
        return type(module).generate(module, *args, **options)


def _refuse_arguments(
    dynamo_backend: Any = None,
    fsdp_plugin: Any = None,
    kwargs_handlers: Any = None,
    parallelism_config: accelerate.ParallelismConfig | None = None,
    **_: Any,
) -> None:
    """Refuse what would be ignored, or what Accelerate's own error would say less about.

    Raises:
        ConfigError: naming it.
    """
    if str(getattr(dynamo_backend, "value", dynamo_backend)).lower() == "zerograph":
        raise ConfigError(
            'Accelerate has a closed list of backends, so dynamo_backend="zerograph" cannot be given by name',
            "leave it out: backend=zerograph.backend(stage=3) shards and compiles",
        )
    ddp = [h for h in kwargs_handlers or () if isinstance(h, accelerate.DistributedDataParallelKwargs)]
    for name, given in (("fsdp_plugin", fsdp_plugin), ("DistributedDataParallelKwargs", ddp)):
        if given:
            raise ConfigError(
                f"Accelerator was given {name}, which nothing here would read",
                "leave it out: backend=zerograph.backend(...) takes stage, dtypes and bucket sizes",
            )
    if parallelism_config is not None:
        _refuse_axes(parallelism_config)


def _refuse_others(accelerator: accelerate.Accelerator) -> None:
    """Refuse what would distribute or compile the model beside ZeroGraph, and ranks that do not know of each other.

    Raises:
        ConfigError: naming it.
    """
    state = accelerator.state
    if state.parallelism_config is not None:
        _refuse_axes(state.parallelism_config)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes < started:
        raise ConfigError(
            f"{started} processes were started and Accelerate counts {state.num_processes}: each would train alone",
            "on CPUs tell it so: Accelerator(cpu=True), or use_cpu=True in TrainingArguments",
        )
    found = {
        f"distributed type {state.distributed_type.value}": state.distributed_type
        in (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA),
        f"dynamo backend {state.dynamo_plugin.backend.value}": state.dynamo_plugin.backend != DynamoBackend.NO,
        "mixed_precision fp8": accelerator.fp8_enabled,
    }
    for name, given in found.items():
        if given:
            raise ConfigError(
                f"Accelerate was configured with {name}, which ZeroGraph takes the place of",
                "leave it out of the arguments, of `accelerate config` and of ACCELERATE_* variables; "
                "zerograph.backend(...) takes stage, dtype and what is compiled",
            )


def _refuse_axes(config: accelerate.ParallelismConfig) -> None:
    """Refuse axes of a mesh that a model cannot be trained on here.

    Raises:
        ConfigError: naming them.
    """
    hint = (
        "dp_shard_size shards, with dp_replicate_size beside it for replicas (HSDP) or tp_size for tensor parallelism: "
        "together as many as processes"
    )
    refused = {"cp_size": config.cp_size, "sp_size": config.sp_size}
    if config.dp_replicate_size > 1:
        refused["tp_size"] = config.tp_size
    given = [f"{name}={size}" for name, size in refused.items() if size > 1]
    if given:
        raise ConfigError(
            f"parallelism_config has {', '.join(given)}, which ZeroGraph does not do under Accelerate"
            + f" beside dp_replicate_size={config.dp_replicate_size}" * (config.dp_replicate_size > 1),
            hint,
        )
    beside = {"dp_replicate_size": config.dp_replicate_size, "tp_size": config.tp_size}
    others = [f"{name}={size}" for name, size in beside.items() if size > 1]
    if others and config.dp_shard_size == 1:
        raise ConfigError(
            f"parallelism_config has {', '.join(others)} and nothing to shard over",
            f"{hint}; zerograph.backend(stage=0) without a parallelism_config replicates on all ranks",
        )


def _require_parallel(model: nn.Module, accelerator: accelerate.Accelerator) -> None:
    config = accelerator.state.parallelism_config
    if config is not None and config.tp_size > 1:
        require_parallel(
            model,
            accelerator.torch_device_mesh["tp"],
            f"parallelism_config with tp_size={config.tp_size}",
            "before prepare(): zerograph.integrations.tensor_parallel.tensor_parallel(model, mesh) of a model of "
            'transformers, or parallelize_module(model, mesh, plan), with mesh = accelerator.torch_device_mesh["tp"]',
        )


def _on_axes(backend: Backend, accelerator: accelerate.Accelerator) -> Backend:
    """``backend``, or a copy of it for the mesh that a ``parallelism_config`` tells.

    Raises:
        ConfigError: it has a mesh of its own.
    """
    config = accelerator.state.parallelism_config
    if config is None or not config.dp_dim_names:
        return backend
    if backend.config.mesh is not None:
        raise ConfigError(
            "Accelerator was given a parallelism_config, and its backend a mesh: which ranks shard would be said twice",
            "leave one of them out",
        )
    return Backend(replace(backend.config, mesh=accelerator.torch_device_mesh[tuple(config.dp_dim_names)]))
