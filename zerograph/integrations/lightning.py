"""Lightning: :class:`ZeroGraphStrategy` for its Trainer, :class:`ZeroGraphFabricStrategy` for Fabric.

Both are ``ModelParallelStrategy``, Lightning's strategy for models whose parameters are DTensors, with the model
sharded and compiled for the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.load import _METADATA_FILENAME, _move_state_into
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy as TrainerModelParallel
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType
from torch.optim import Optimizer

import zerograph
from zerograph.api import Backend, refuse_other_backends
from zerograph.core.arguments import require, require_flag
from zerograph.core.errors import CheckpointError, ConfigError, UnsupportedError
from zerograph.core.units import is_number
from zerograph.integrations.models import compile_call, held_back, require_parallel
from zerograph.sharding.module_classes import plain_class
from zerograph.sharding.shards import agree

State = dict[str, Any]
"""The content of a checkpoint: modules, optimizers and anything else, by name."""


_Mixed: Any = FabricModelParallel if TYPE_CHECKING else object


class _DataParallel(_Mixed):
    """Processes of both strategies: data-parallel ones have batches of their own, and rows of every parameter."""

    def __init__(
        self,
        backend: Backend,
        save_distributed_checkpoint: bool = True,
        tensor_parallel_size: int = 1,
        **options: Any,
    ) -> None:
        refuse_other_backends(backend, type(self).__name__)
        require_flag("save_distributed_checkpoint", save_distributed_checkpoint, "False writes one file")
        require(
            is_number(tensor_parallel_size, int) and tensor_parallel_size > 0,
            f"tensor_parallel_size must be a number of processes, got {tensor_parallel_size!r:.80}",
            "those that share a batch; 1 is data-parallel",
        )
        require(
            tensor_parallel_size == 1 or backend.config.mesh is None,
            "the strategy has a tensor_parallel_size, and its backend a mesh: which ranks shard would be said twice",
            "leave one of them out",
        )
        self.zerograph_backend, self._tensor_parallel = backend, tensor_parallel_size
        self._mesh_of_first: Any = None
        super().__init__(save_distributed_checkpoint=save_distributed_checkpoint, **options)

    def setup_environment(self) -> None:
        processes = self.num_nodes * self.num_processes  # type: ignore[attr-defined]
        require(
            self._tensor_parallel in (1, *(size for size in range(2, processes) if processes % size == 0)),
            f"tensor_parallel_size={self._tensor_parallel} of {processes} processes leaves none to shard over",
            "a size that divides the processes, at least twice; 1 is data-parallel",
        )
        # The strategy asks for both before it makes its mesh.
        self._data_parallel_size, self._tensor_parallel_size = processes // self._tensor_parallel, self._tensor_parallel
        super().setup_environment()  # type: ignore[misc]
        if self._tensor_parallel > 1 and self._mesh_of_first is None:
            self._mesh_of_first = self.device_mesh
            mesh = self.device_mesh["data_parallel"]
            self.zerograph_backend = Backend(replace(self.zerograph_backend.config, mesh=mesh))
        elif self._tensor_parallel > 1:  # a Trainer sets up each time, and models stay on the mesh that they are on
            self._device_mesh = self._mesh_of_first
            if getattr(self, "lightning_module", None) is not None:
                self.lightning_module._device_mesh = self._mesh_of_first  # type: ignore[attr-defined]

    def shard(self, module: nn.Module) -> nn.Module:
        """Shard and compile ``module``, once it is parallel, where it is to be."""
        if self._tensor_parallel > 1:
            require_parallel(
                module,
                self.device_mesh["tensor_parallel"],
                f"tensor_parallel_size={self._tensor_parallel}",
                'parallelize it on strategy.device_mesh["tensor_parallel"], in configure_model or before setup',
            )
        return shard_and_compile(module, self.zerograph_backend)


class ZeroGraphFabricStrategy(_DataParallel, FabricModelParallel):  # type: ignore[misc]
    """Shards and compiles under Fabric: ``Fabric(strategy=ZeroGraphFabricStrategy(zerograph.backend(stage=3)))``.

    Args:
        backend: made by ``zerograph.backend(...)``.
        save_distributed_checkpoint: True writes a checkpoint as a folder, each rank its shards; False as one file, rank
            0 whole weights and states. Both load at any number of ranks.
        tensor_parallel_size: processes that share a batch, over which the model is parallelized before it is set up: on
            ``strategy.device_mesh["tensor_parallel"]``. ``strategy.zerograph_backend`` is then a copy of ``backend``.
        options: ``process_group_backend`` and ``timeout``, as of other strategies.
    """

    def __init__(self, backend: Backend, save_distributed_checkpoint: bool = True, **options: Any) -> None:
        def shard(module: nn.Module, mesh: Any) -> nn.Module:
            return self.shard(module.to(self.root_device))

        super().__init__(backend, save_distributed_checkpoint, parallelize_fn=shard, **options)
        self._backward_sync_control = _BackwardSync(self)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """As other strategies; the norm that is returned is a plain tensor, the same on all ranks."""
        self.precision.unscale_gradients(optimizer)
        return zerograph.clip_grad_norm_(self.precision.main_params(optimizer), max_norm, norm_type, error_if_nonfinite)

    def save_checkpoint(
        self, path: str | Path, state: State, storage_options: Any = None, filter: Mapping[str, Any] | None = None
    ) -> None:
        if storage_options is not None or filter is not None:
            raise ConfigError("storage_options and filter are for strategies that write one file", "leave them out")
        path, as_folder = Path(self.broadcast(path)), self._save_distributed_checkpoint
        if self.broadcast(path.is_file() if as_folder else path.is_dir()):
            raise CheckpointError(
                f"{path} is a {'file' if as_folder else 'folder'}, and save_distributed_checkpoint={as_folder} writes "
                f"{'a folder' if as_folder else 'one file'}",
                "save to another path, or delete what is there",
            )
        tensors = _tensors(state, full=not as_folder)
        rest = {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in state.items() if k not in tensors}
        if as_folder:
            dcp.save(tensors, checkpoint_id=path)
        whole = (rest, path / _METADATA_FILENAME) if as_folder else (tensors | rest, path)
        agree(dist.group.WORLD, lambda: _save(*whole), CheckpointError, first=True)

    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | State | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> State:
        if isinstance(state, nn.Module):  # Fabric.load_raw: a file of weights alone
            weights = torch.load(self.broadcast(path), mmap=True, map_location="cpu")
            set_model_state_dict(state, weights, options=StateDictOptions(full_state_dict=True, strict=strict))
            return {}
        if not isinstance(state, dict):
            raise CheckpointError(f"cannot load into {state!r}", "give a dictionary of the model and its optimizers")
        path = Path(self.broadcast(path))
        rest = _read(path, state, weights_only)
        tensors = {key: rest.pop(key) for key in _with_tensors(state)}
        _restore(state, tensors, full=path.is_file(), strict=strict)
        _move_state_into(source=rest, destination=state, keys=(state.keys() - tensors.keys()) & rest.keys())
        return rest


class ZeroGraphStrategy(_DataParallel, TrainerModelParallel):  # type: ignore[misc]
    """Shards and compiles under Lightning: ``Trainer(strategy=ZeroGraphStrategy(zerograph.backend(stage=3)))``.

    The LightningModule needs no ``configure_model``, unless it is parallelized in that. Its own call is compiled, if it
    has a ``forward``, and so are those of its children. Arguments are those of :class:`ZeroGraphFabricStrategy`.
    """

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {
            "num_replicas": self.world_size // self._tensor_parallel,
            "rank": self.global_rank // self._tensor_parallel,
        }

    def setup(self, trainer: Any) -> None:
        """As other strategies: the model goes to its device, is sharded, and optimizers are made."""
        assert self.accelerator is not None
        for callback in trainer.callbacks:
            _refuse(callback)
        self.accelerator.setup(trainer)
        self.model: nn.Module = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.shard(self.model)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with held_back(self.zerograph_backend):
            yield

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> State:
        path, module = Path(self.broadcast(checkpoint_path)), self.lightning_module
        assert module is not None
        state = {"state_dict": module, **{f"optimizer_{i}": o for i, o in enumerate(self.optimizers)}}
        rest = _read(path, state, weights_only)
        if path.is_file():  # as Lightning writes files: optimizers in a list, parameters by number
            found = rest.pop("optimizer_states", [])
            if len(found) < len(self.optimizers):  # an evaluation has none
                raise CheckpointError(
                    f"{path} has states of {len(found)} optimizers, and {len(self.optimizers)} are trained",
                    "give load_from_checkpoint a file of weights alone, and train from there",
                )
            by_name = [_by_name(*each, module) for each in zip(found, self.optimizers, strict=False)]
            rest |= {f"optimizer_{i}": states for i, states in enumerate(by_name)}
        tensors = {key: rest.pop(key) for key in state}
        _restore(state, tensors, full=path.is_file(), strict=module.strict_loading)
        return rest


def _refuse(callback: Callback) -> None:
    if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
        raise UnsupportedError(
            f"{type(callback).__name__} copies the model while it is plain, and cannot average sharded parameters",
            "update a torch.optim.swa_utils.AveragedModel in a callback of your own (docs/guide/parameters.md)",
        )
    if isinstance(callback, ModelPruning):
        raise UnsupportedError(
            f"{type(callback).__name__} replaces parameters by masked ones, which the model has sharded by then",
            "set weights to zero inside of zerograph.gathered(module, writeback=True), in a callback of your own "
            "(docs/guide/parameters.md)",
        )


def _by_name(states: State, optimizer: Optimizer, module: nn.Module) -> State:
    """The states of ``optimizer`` from a file of Lightning, by names of parameters.

    DDP and single devices number parameters as the optimizer has them, one after another; ModelParallelStrategy and
    this one as the model has them.
    """
    numbers = [number for group in states["param_groups"] for number in group["params"]]
    as_optimizer = numbers == list(range(len(numbers))) and list(states["state"]) == sorted(states["state"])
    own = optimizer if as_optimizer else None
    return FullyShardedDataParallel.rekey_optim_state_dict(states, OptimStateKeyType.PARAM_NAME, module, optim=own)


class _BackwardSync(_BackwardSyncControl):
    def __init__(self, strategy: _DataParallel) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return held_back(self._strategy.zerograph_backend) if enabled else nullcontext()


def shard_and_compile(module: nn.Module, backend: Backend) -> nn.Module:
    """Shard ``module`` and compile what loops call: its own forward, and of a LightningModule its children's.

    Does nothing to a module that was given to this backend before: a Trainer may fit one several times.
    """
    if getattr(module, "_zerograph_backend", None) is not backend:
        zerograph.shard(module, backend)
        _compile(module, backend)
        module.__dict__["_zerograph_backend"] = backend
    return module


def _compile(module: nn.Module, backend: Backend) -> None:
    own = plain_class(module).forward not in (LightningModule.forward, nn.Module.forward, nn.ModuleList.forward)
    if own:
        compile_call(module, backend)
    if not own or isinstance(module, LightningModule):
        for child in module.children():
            if any(True for _ in child.parameters()):
                _compile(child, backend)


def _save(content: State, path: Path) -> None:
    """``torch.save``, by which a file that is there is replaced when all is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        torch.save(content, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _with_tensors(state: State) -> list[str]:
    return [key for key, value in state.items() if isinstance(value, nn.Module | Optimizer)]


def _module_of(state: State) -> nn.Module:
    modules = [value for value in state.values() if isinstance(value, nn.Module)]
    if len(modules) != 1:
        raise CheckpointError(
            f"a checkpoint holds one model and its optimizers; this one was given {len(modules)} models",
            "save each model, with its optimizers, to a path of its own",
        )
    return modules[0]


def _tensors(state: State, full: bool) -> dict[str, Any]:
    """Weights and optimizer states on the host: this rank's shards, or with ``full`` the whole of them on rank 0."""
    module, options = _module_of(state), StateDictOptions(full_state_dict=full, cpu_offload=True)
    return {
        key: get_model_state_dict(module, options=options)
        if isinstance(state[key], nn.Module)
        else get_optimizer_state_dict(module, state[key], options=options)
        for key in _with_tensors(state)
    }


def _read(path: Path, state: State, weights_only: bool | None) -> State:
    """The content of a folder, or a file; from a folder, this rank's shards of the entries in ``state``."""
    if path.is_file():
        return torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)  # type: ignore[no-any-return]
    if not (path / _METADATA_FILENAME).is_file():
        raise CheckpointError(f"{path} is no checkpoint: neither a file nor a folder with {_METADATA_FILENAME}")
    tensors = _tensors(state, full=False)
    dcp.load(tensors, checkpoint_id=path)
    return {**torch.load(path / _METADATA_FILENAME, weights_only=weights_only), **tensors}


def _restore(state: State, tensors: dict[str, Any], full: bool, strict: bool) -> None:
    module, options = _module_of(state), StateDictOptions(full_state_dict=full, strict=strict)
    for key, values in tensors.items():
        if isinstance(state[key], nn.Module):
            set_model_state_dict(module, values, options=options)
        else:
            # Of whole states torch asks on which device they are, and those of SGD without momentum are nowhere.
            split = replace(options, full_state_dict=full and _holds_tensors(values))
            set_optimizer_state_dict(module, state[key], values, options=split)


def _holds_tensors(states: State) -> bool:
    return any(isinstance(v, Tensor) and v.dim() for each in states["state"].values() for v in each.values())
