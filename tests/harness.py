"""Trace a model once, and train it by many plans.

Dynamo and AOTAutograd take a second for the smallest model, and tests of plans differ in what comes behind them. So
:class:`Traced` keeps what they make of a model, and each :func:`run` plans, rewrites and lowers a copy of it, and runs
the programs, with eager segments, on ranks that are threads (:mod:`thread_ranks`): with backends as users have them,
and the executor, stores, arenas and optimizers of these. Only Dynamo is not asked; :func:`run_processes` has the same
script run from end to end.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import ranks as processes
import torch
import torch.distributed as dist
from thread_ranks import ThreadCommunicator, ThreadGroup
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from traced import Graph, Programs, trace

import zerograph
from zerograph.api import Backend
from zerograph.compiler.compilation import Compilation
from zerograph.compiler.frame import Frame
from zerograph.core.config import Config
from zerograph.core.garbage import without_gc
from zerograph.core.layout import rows_of
from zerograph.dryrun.compile_only import Compiled, simulated_rank
from zerograph.runtime.assigned import remember
from zerograph.runtime.comm.collectives import LoneCommunicator
from zerograph.runtime.dtensors import is_sharded
from zerograph.runtime.executor.executor import Executor
from zerograph.runtime.torch_private import as_dtensor, local_tensor
from zerograph.sharding.adopt import _MESHES
from zerograph.sharding.ranks import Ranks

CPU = torch.device("cpu")
Make = Callable[..., tuple[nn.Module, tuple[Tensor, ...]]]
"""Makes a model that returns one tensor, and inputs of the shapes that it is called with."""


def run(
    world_size: int,
    script: Callable[..., Any],
    make: Make,
    *given: Any,
    optimizer: Callable[[Any], Optimizer],
    by_rank: bool = False,
    **options: Any,
) -> list[Any]:
    """What ``script(rank)`` returns on every :class:`Rank`.

    Args:
        make: of the model, from ``given``; both are kept, so let them be constants.
        optimizer: of something with ``parameters()``.
        by_rank: whether each rank traces and compiles for itself. Else they share what the first one does, which is the
            same but for the shapes of shards, of which programs with tiles know.
        options: arguments of :func:`zerograph.backend`.
    """
    config = Config.of(compute="eager", **options)
    traced = [_traced_for(rank, world_size, config, make, *given) for rank in range(world_size if by_rank else 1)]
    return _cleanly(_run, traced, config, script, optimizer)


def run_processes(world_size: int, script: Callable[..., Any], make: Make, *given: Any, **options: Any) -> list[Any]:
    """As :func:`run` on processes, each with Dynamo; what it is given, and returns, is pickled."""
    return processes.run(world_size, functools.partial(_here, script, make, *given, **options))


def run_here(_: int, script: Callable[..., Any], make: Make, *given: Any, **options: Any) -> list[Any]:
    """As :func:`run` in this process with Dynamo, which is the only rank whatever the world size; without options in
    plain PyTorch, of parameters that are ``dtype``."""
    return [_cleanly(functools.partial(_here, script, make, *given, **options))]


def _here(
    script: Callable[..., Any],
    make: Make,
    *given: Any,
    optimizer: Callable[[Any], Optimizer],
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, _ = make(*given)
    if not options:
        return script(Module(model.to(dtype), optimizer, None))
    return script(Module(model, optimizer, zerograph.backend(**{"compute": "eager", "dtype": dtype, **options})))


def _run(
    traced: Sequence[Traced], config: Config, script: Callable[..., Any], optimizer: Callable[[Any], Optimizer]
) -> list[Any]:
    world_size = traced[0].world_size
    group, made, ranks = ThreadGroup(world_size), list[Made](), list[Rank]()
    for comm in group.ranks if world_size > 1 else (LoneCommunicator(),):
        with simulated_rank(min(comm.rank, len(traced) - 1), world_size):
            made += [Made(one, config) for one in traced[len(made) : comm.rank + 1]]
            ranks.append(Rank(made[-1], optimizer, comm))
    with simulated_rank(0, world_size):
        return group.run(script, ranks) if world_size > 1 else [script(*ranks)]


def _cleanly(function: Callable[..., Any], *given: Any) -> Any:
    """Collect the garbage of a run behind it: each backend hears of every step while it lives, in whatever thread."""
    hook = sys.excepthook  # which each process group wraps once more
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # beside other work the threads of small kernels wait for each other longer than they work
    try:
        with without_gc():
            return function(*given)
    finally:
        torch.set_num_threads(threads)
        sys.excepthook = hook
        gc.collect()
        gc.freeze()  # what stays is searched by no later collection


def dry_run(world_size: int, make: Make, *given: Any, **options: Any) -> Compiled:
    """As :func:`~zerograph.dryrun.compile_only.compile_only` has it, of a model that is traced once; kept, for all who
    ask for the same."""
    config = Config.of(compute="eager", **options)
    traced = _traced_for(0, world_size, config, make, *given)
    return Compiled(_planned_frame(traced, config), config, 0, 0, 0)


@functools.lru_cache(maxsize=32)
def _planned_frame(traced: Traced, config: Config) -> Frame:
    with simulated_rank(0, traced.world_size):
        frame, _ = _cleanly(lambda: Made(traced, config).training)
    return frame


def _traced_for(rank: int, world_size: int, config: Config, make: Make, *given: Any) -> Traced:
    """The model as it is traced for backends of this ``config``."""
    leaves = world_size == 1 and config.offloads  # else a lone rank splits nothing
    return _traced(rank, world_size, config.sharding == 0, config.dtype, config.reduce_dtype, leaves, make, *given)


@functools.lru_cache(maxsize=32)
def _traced(
    rank: int,
    world_size: int,
    unsharded: bool,
    dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    leaves: bool,
    make: Make,
    *given: Any,
) -> Traced:
    offloaded: dict[str, Any] = {"offload": "parameters", "path": "/"} if leaves else {}
    config = Config.of(
        compute="eager", stage=0 if unsharded else 3, dtype=dtype, reduce_dtype=reduce_dtype, **offloaded
    )
    torch.manual_seed(0)
    return Traced(rank, world_size, config, *make(*given))


class Traced:
    """A model on one of ``world_size`` ranks: its graphs, and its values, which every run begins from."""

    def __init__(self, rank: int, world_size: int, config: Config, model: nn.Module, given: Sequence[Tensor]) -> None:
        self.world_size, self.model, self.given = world_size, model, given
        self.values = {name: value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()}
        _MESHES.clear()  # a mesh knows its rank, and the ones here are of other ranks
        with simulated_rank(rank, world_size):
            self.backend = Backend(config)
            self.backend._adoption.shard([model], CPU)
            del self.backend._optimizers  # it would look at every step of the process
            self.params = self.backend._adoption.params or dict(model.named_parameters())
            self.training = trace(self.backend, model, self.params, given)

    @functools.cached_property
    def evaluation(self) -> Graph:
        """What the model does without gradients, inside of the simulated group of a run."""
        with torch.no_grad():
            return trace(self.backend, self.model, self.params, self.given)

    def outward(self, rank: int) -> dict[str, nn.Parameter]:
        """The parameters as ``rank`` has them before the first step."""
        found = {}
        for name, like in self.params.items():
            value = self.values[name]
            local = value[rows_of(like.shape[0], rank, self.world_size)] if is_sharded(like) else value
            local = torch.empty_like(local).copy_(local)
            if isinstance(like, DTensor):
                local = as_dtensor(local, like.device_mesh, like.placements, like.shape, like.stride())
            found[name] = nn.Parameter(local, requires_grad=like.requires_grad)
        return found


class Made:
    """What one plan makes of a traced model; the same for all ranks."""

    def __init__(self, traced: Traced, config: Config) -> None:
        self.traced, self.config = traced, config
        self._backend = backend = Backend(config)
        backend._adoption.params |= traced.backend._adoption.params
        backend._adoption.tied |= traced.backend._adoption.tied
        backend._connected(Ranks(CPU, traced.world_size))
        del backend._optimizers  # it would look at every step of the process

    @functools.cached_property
    def training(self) -> Programs:
        """Forward and backward."""
        return self.traced.training.compiled(self._compilation(), 0)

    @functools.cached_property
    def evaluation(self) -> Programs:
        """The program without gradients."""
        return self.traced.evaluation.compiled(self._compilation(), 1)

    def _compilation(self) -> Compilation:
        return replace(self._backend._compilation, runtime_for=None, segments=self.traced.backend._segments)


class Rank:
    """A model that trains on one rank.

    Attributes:
        backend: as ``torch.compile`` has it.
        params: the outward parameters by name.
        optimizer: of these.
    """

    def __init__(
        self, made: Made, optimizer: Callable[[Any], Optimizer], comm: ThreadCommunicator | LoneCommunicator
    ) -> None:
        self.rank, self.world_size, self._made, self._traced = comm.rank, comm.world_size, made, made.traced
        self.params = self._traced.outward(comm.rank)
        self.backend = Backend(made.config)
        adoption, mesh = self.backend._adoption, self._traced.backend._adoption.ranks.mesh  # type: ignore[union-attr]
        ranks = Ranks(CPU, comm.world_size, mesh, comm)
        if self._traced.backend._adoption.params:
            adoption.params |= self.params
            adoption.known.update(map(id, self.params.values()))
        adoption.ranks = ranks
        self.backend._connected(ranks)
        remember(self.params.values())
        self._executors = self._loaded(made.training)
        self.backend._place_shards(made.training[0])
        self.optimizer = optimizer(self)

    def parameters(self) -> Iterable[nn.Parameter]:
        """Those that train, and those that do not."""
        return self.params.values()

    def _loaded(self, programs: Programs) -> dict[str, Executor]:
        frame, segments = programs
        self.backend._frames.append(frame)
        runtime_for = self.backend._compilation.runtime_for
        assert runtime_for is not None
        runtime = runtime_for(frame.index, frame.code, frame.plan)
        return {kind: Executor(program, segments[kind], runtime) for kind, program in frame.programs.items()}

    def __call__(self, *given: Tensor) -> Tensor:
        """What the model returns for these arguments."""
        if not torch.is_grad_enabled():
            return self._evaluate(*given)
        return self._call(self._traced.training, given)

    def _evaluate(self, *given: Tensor) -> Tensor:
        if "inference" not in self._executors:
            self._executors |= self._loaded(self._made.evaluation)
        return self._call(self._traced.evaluation, given)

    def _call(self, graph: Graph, given: Sequence[Tensor]) -> Tensor:
        found: Tensor = graph.call(self._executors, {**self._traced.values, **self.params}, given)
        return found

    def local(self) -> dict[str, Tensor]:
        """This rank's rows of all parameters and optimizer states, copied."""
        found = {name: local_tensor(param).detach().clone() for name, param in self.params.items()}
        for name, param in self.params.items():
            for key, value in self.optimizer.state.get(param, {}).items():
                found[f"{name}.{key}"] = local_tensor(torch.as_tensor(value)).detach().clone()
        return found

    def gradients(self) -> dict[str, Tensor]:
        """This rank's rows of all gradients, copied."""
        return {n: local_tensor(p.grad).clone() for n, p in self.params.items() if p.grad is not None}


class Module(Rank):
    """A model that trains in this process, compiled by Dynamo for the ``backend``, or by nobody."""

    def __init__(self, module: nn.Module, optimizer: Callable[[Any], Optimizer], backend: Backend | None) -> None:
        grouped = backend is not None and dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        self.backend, self._module = backend, module
        if backend is not None:
            module.compile(backend=backend)
        self.optimizer = optimizer(self)

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """Which others replace in the first call."""
        return dict(self._module.named_parameters())

    def __call__(self, *given: Tensor) -> Tensor:
        """What the model returns for these arguments."""
        return self._module(*given)
