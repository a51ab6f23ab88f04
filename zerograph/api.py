"""The calls of users: backends for ``torch.compile``, and models sharded for them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerograph.compiler.compilation import Compilation
from zerograph.compiler.driver import compile_frame
from zerograph.compiler.frame import Frame, last_frame, traced_function
from zerograph.compiler.frame_plan import MOMENTS, Planner, farthest
from zerograph.compiler.lowering.segments import SegmentCache
from zerograph.compiler.recording import Recording
from zerograph.compiler.report import Report
from zerograph.compiler.room import free_room
from zerograph.compiler.torch_private import graph_breaks
from zerograph.core.arguments import require, require_flag, require_kind
from zerograph.core.config import Config
from zerograph.core.errors import ConfigError, UnsupportedError, ZeroGraphError
from zerograph.core.machine import is_disk
from zerograph.core.plan import Plan
from zerograph.core.program import Program
from zerograph.optim.check import OptimizerCheck
from zerograph.runtime import delayed
from zerograph.runtime.assigned import remember
from zerograph.runtime.comm.communicator import Communicator
from zerograph.runtime.executor.accumulation import GradientAccumulation
from zerograph.runtime.executor.early import EarlyUpdates
from zerograph.runtime.executor.executor import Runtime
from zerograph.runtime.executor.residency import GatheredCache, StepCount
from zerograph.runtime.executor.telemetry import Telemetry
from zerograph.runtime.executor.uncompiled import UncompiledReads
from zerograph.runtime.malloc import return_large_blocks
from zerograph.runtime.offload.hosted import HostShards
from zerograph.runtime.offload.nvme import Arena
from zerograph.runtime.offload.saved import room_for
from zerograph.runtime.offload.shards import ShardStore
from zerograph.runtime.testing.simulated_host import SimulatedHost
from zerograph.sharding import adopt
from zerograph.sharding.adoption import Adoption
from zerograph.sharding.files.materialize import Files, Init, files_to_read, fill
from zerograph.sharding.ranks import Ranks, device_of
from zerograph.sharding.torch_private import Retrace, before_traces, called_model, errors_reach_users


class Backend:
    """Compiles the frames of one model; :func:`zerograph.backend` makes it.

    Attributes:
        config: the validated arguments.
    """

    def __init__(self, config: Config) -> None:
        require_kind(config, Config, "zerograph.Backend", "zerograph.backend(stage=3) makes one")
        self.config = config
        self._frames: list[Frame] = []
        self._adoption = Adoption(config, self._connect, remember, self._reads)
        self._segments = SegmentCache(config.compute)
        self._telemetry = Telemetry()
        # The same sets and dicts for all: adoption fills them when a model comes, and everyone sees it.
        self._steps = StepCount(self._adoption.params)
        self._accumulation = GradientAccumulation(self._adoption.params)
        self._store = ShardStore(self._adoption.params, self._open_arena)
        self._waiting: dict[str, int] = {}  # bytes of activations on NVMe, by the user's function
        self._optimizers = OptimizerCheck(
            self._adoption.known,
            self._adoption.replaced,
            lambda: self._adoption.skipped(self),
            self._accumulation,
            self._telemetry,
            lambda: self._adoption.communicator,
            self._store,
            self._steps,
            self._adoption.complete_gradients,
            lambda: self._adoption.why_reduced,
        )
        self._early = EarlyUpdates(
            self._adoption.params, lambda: self._optimizers.overlapping(self._adoption.why_unsharded)
        )
        # A graph without parameters may come before the model that tells what to compile for: it needs no other rank.
        alone = replace(config, plan=None, memory=None, stage=config.sharding, offload="none", activations="keep")
        self._compile_for(Ranks(torch.device("cpu")), alone)
        self._recording: Recording | None = None
        self._given: object = self  # what torch.compile has for the backend: this one, or the function that made it
        self._breaks_before = graph_breaks()
        before_traces(_adopt_early)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Dynamo's entry: adopt the model on its first call, then compile the frame."""
        with errors_reach_users():
            _refuse_options(options)
            if not self._adoption.covers(gm, adopt.called_by(self._given)):
                return gm  # inside zerograph.gathered: plain parameters, on this rank alone
            frame = Frame(self._compilation, len(self._frames), traced_function())
            self._frames.append(frame)
            with self._adoption.compiling(frame.code):
                compiled = compile_frame(frame, gm, example_inputs, self._planner)
                late = self._adoption.late(frame.plan) if "backward" in frame.programs else {}
                if "backward" in frame.programs and not late:
                    self._place_shards(frame)  # not while anything is traced
            if late:
                self._frames.pop()
                self._adoption.leave(late)
                raise Retrace
            return compiled

    def _place_shards(self, frame: Frame) -> None:
        """Move the shards that leave the device by the plan of a training frame."""
        # They have other memory then, which nobody has assigned.
        rest = frame.plan.farthest if self.config.plan is not None else farthest(self.config)
        moved = lambda param: remember([param])  # noqa: E731
        offloaded = room_for(frame.programs["forward"])
        self._waiting[frame.code] = max(offloaded, self._waiting.get(frame.code, 0))
        self._store.place(frame.plan, MOMENTS, moved, rest, sum(self._waiting.values()))
        self._store.fetches.know_gathers(frame.programs["forward"])

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are fresh backends with the same arguments: programs belong to one model."""
        return (Backend, (self.config,))

    def _connect(self, device: torch.device, params: Sequence[Tensor]) -> Ranks:
        """Connect to the other ranks: with them there is all that frames are compiled for."""
        self.config.refuse_device(device.type)
        self._segments.prepare(device)
        ranks = Ranks.connect(self.config, device, params)
        self._connected(ranks)
        return ranks

    def _connected(self, ranks: Ranks) -> None:
        """These are the ranks to compile for."""
        if ranks.device.type == "cpu" and self.config.memory and self.config.path:
            return_large_blocks()  # who bounds memory and has it on NVMe instead means the process's
        if self.config.split or ranks.host is not None:
            host = ranks.host or SimulatedHost()
            host.timings = self._store.timings
            self._store.locations.host = HostShards(self._adoption.params, host)
        self._compile_for(ranks, self.config)

    def _compile_for(self, ranks: Ranks, config: Config) -> None:
        steps, accumulation, telemetry = self._steps, self._accumulation, self._telemetry

        def runtime_for(index: int, code: str, plan: Plan) -> Runtime:
            cache = GatheredCache(steps, accumulation)
            comm, store, early = ranks.communicator, self._store, self._early
            return Runtime(index, comm, cache, accumulation, telemetry, store, ranks.device, code, early, ranks.beside)

        self._planner = Planner(
            config,
            ranks.size,
            self._adoption.params,
            ranks.device,
            ranks.agreement,
            free=free_room(config, ranks.device.type),
            replicas=ranks.replicas,
            per_host=ranks.per_host,
        )
        self._compilation = Compilation(
            world_size=ranks.size,
            segments=self._segments,
            plan_for=self._planner.plan,
            device=ranks.device,
            runtime_for=runtime_for,
            agreement=ranks.agreement,
            tied=self._adoption.tied,
            loss_only=config.loss_only,
            cut_by=config.cut_by,
            wires=config.wires,
            groups=ranks.groups,
            staging=self._planner.staging,
        )

    def _open_arena(self, size: int) -> Arena | None:
        held = sum(arena.size for arena in {self._store.room.opened, *self._store.saved.arenas} if arena is not None)
        left, timings = self._planner.room["nvme"] - held, self._store.timings
        if self.config.nvme:  # all at once
            return None if held else Arena(self.config.path, self.config.nvme, timings=timings)
        return Arena(self.config.path, min(size, left), timings=timings) if left > 0 else None

    def refresh(self) -> None:
        """Gather parameters anew, after a change that no version counter shows (``.data``, ``torch._foreach_mul_``).

        Needed only with masters on NVMe or the host, whose copies are gathered; elsewhere parameters have no copies.
        """
        delayed.settle(self._adoption.params.values())
        self._store.copies.touched(self._adoption.params.values())

    def _reads(self, communicator: Communicator) -> UncompiledReads:
        """How code that is not compiled reads parameters."""
        known, stage = self._adoption.known, self.config.sharding
        return UncompiledReads(communicator, known, self._steps, self._accumulation, stage)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Hold gradients back on each rank, whole, until the next backward outside of this context.

        As with DistributedDataParallel, the reduction then covers all of them at once. Costs the memory of the full
        gradients at every stage.
        """
        return self._accumulation.holding_back()

    @contextlib.contextmanager
    def record(self, *, memory: bool = False) -> Iterator[Recording]:
        """Record one training step: forward, backward and, if wanted, the optimizer's step.

        The compiled model must have run before. torch's profiler runs meanwhile, and on an accelerator the host waits
        for every instruction, so the step is slower than others. ``report()`` shows the last recording.

        Args:
            memory: remember every allocation on the device, which :meth:`Recording.save_memory` writes for
                pytorch.org/memory_viz. A history that torch kept before ends with the recording.

        Raises:
            ZeroGraphError: nothing was compiled yet, or anything but one step ran.
            ConfigError: ``memory`` is no bool, or torch remembers no allocations of the device, as of a CPU.
        """
        require_flag("memory", memory, "memory=True remembers the allocations of the step, on a GPU")
        params, stepped = self._adoption.params, self._optimizers.stepped
        with Recording(self._frames, params, stepped, self._planner.machine, memory) as recording:
            yield recording
        self._recording = recording

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Every frame (a graph that Dynamo handed over) compiled so far, in order."""
        return tuple(self._frames)

    @property
    def plan(self) -> Plan:
        """The plan of the last training frame (of the last frame, when there is none).

        Raises:
            ZeroGraphError: nothing was compiled yet.
        """
        return last_frame(self._frames).plan

    @property
    def program(self) -> dict[str, Program]:
        """The programs of the frame of :attr:`plan` by kind: "forward" and "backward", or "inference"."""
        return last_frame(self._frames).programs

    def report(self) -> Report:
        """Decisions of the planner, and counts of everything that ran so far; ``print`` it."""
        ranks, recording = self._adoption.ranks, self._recording
        return Report.of(
            self.config.stage,
            ranks.size if ranks is not None else 1,
            ranks.replicas if ranks is not None else 1,
            ranks.communicator if ranks is not None else None,
            self._frames,
            self._segments,
            self._telemetry,
            self._store,
            self._breaks_before,
            recording.beside_forecast() if recording is not None else None,
        )


def _adopt_early() -> None:
    """Dynamo is about to trace a frame."""
    model, given = called_model() or (None, None)
    if model is not None and isinstance(given, Backend):
        given._adoption.before_trace(model)


def backend(*positional: Any, **options: Any) -> Backend:
    """A ``torch.compile`` backend that shards training over ranks (ZeRO).

    Args:
        stage: 0 (nothing sharded, like DistributedDataParallel), 1 (optimizer states), 2 (gradients too),
            3 (parameters too), or "auto": sharded as at 3, and as many buckets stay gathered from forward to backward
            as make the step faster and fit ``memory``.
        mesh: ``DeviceMesh`` of one dimension, over which the model is sharded, or of two (HSDP): sharded over the last,
            in replicas along the first. Default: all ranks of the default process group, or one process without any.
        dtype: compute and gather dtype; parameters stay as they are. Default: each parameter's own.
        reduce_dtype: dtype in which gradients are summed over ranks; default: float32 under 16-bit compute.
        gather_wire: what matrices are gathered as (docs/guide/meshes.md): "bf16", or in blocks of 256 with a scale each
            "fp8" or "int8". Every rank computes with what comes out of that. Default: the compute dtype, which
            loses nothing.
        reduce_wire: likewise what gradients of matrices are sent over a network as, "bf16", "int8" or "int4"; they are
            summed in float32. CPU ranks that share a host's memory send nothing.
        bucket_size: bytes of gathered parameters per collective, or of one larger parameter: an int, or a text such as
            ``"32MiB"``.
        prefetch: buckets gathered ahead, where memory allows; at stage 3 at most ``prefetch + 1`` are gathered at once.
        recompute: activations that the backward computes again: "auto" (those that the partitioner finds cheap; with
            ``memory`` also as many layers as it takes to fit), "none" (all are saved), "full" (every repeated layer
            saves its inputs alone, as with ``torch.utils.checkpoint`` around each), or a number from 0 to 1: that share
            of the layers fully. Layers are modules with a number in their name. Regions of the user's own
            ``torch.utils.checkpoint`` stay as they are.
        tile: tiles that weights run in, one after another, so that none of them is whole (docs/guide/tiling.md):
            a number for each that is larger than a bucket, numbers by patterns of names (``{"*.mlp.*": 4}``), "off", or
            "auto": none, unless ``offload="auto"`` searches for a plan that needs some. At stage 3 only.
        offload: tensors that leave the device between their uses (docs/guide/offload.md): "none"; "optimizer": states,
            and masters of parameters that compute in another dtype; "gradients": those too; "parameters": all of
            these; or "auto": per bucket as much as has to leave for the step to fit ``memory``.
        tier: where they go: "nvme", the default, on GPUs through the host; "host", which on a CPU needs a ``machine``
            that counts as split.
        update: where states on the host are updated: "host", beside them, or "device", through which they then pass in
            slots and back, not with anything on NVMe; or "auto": where a search says that the step is faster.
        host_memory: bytes of the host's memory that a rank may use for offload, ``"100GiB"`` or a number; default: its
            share of the free memory, and no more than ``machine`` has.
        activations: where activations of repeated layers wait for the backward: "keep" keeps them on the device; "host"
            (on GPUs, and on a ``machine`` that counts as split) and "nvme" move them there layer by layer, and back
            before the layer's backward. "auto" keeps them, unless ``offload`` moves something and
            ``memory`` is given: then it is chosen by layer.
        path: folder on NVMe, or a list of folders to stripe over; needed where something goes to NVMe.
        nvme: bytes that a rank reserves there, ``"500GiB"`` or a number; default: room for two moments of each of its
            parameters, a master and everything else that leaves, out of its share of the free space.
        loss_tiles: tiles of tokens that the vocabulary head and its loss run in, so that logits never exist whole
            (docs/guide/tiling.md); "auto": one, or with ``memory`` as many as it takes to fit. The forward has to
            compute the loss. If it returns logits too, see ``loss_only``.
        token_tiles: tiles of tokens that the MLPs of recomputed layers run in, with the norm and residual around them,
            so that nothing wider than the model exists whole (docs/guide/tiling.md); more than 1 recomputes all layers
            where ``recompute`` is "auto". "auto": one, or with ``memory`` more where nothing else fits.
        batch_tiles: parts of the batch that layers run for, forward and backward, all of a layer one part after
            another before the next layer begins: its weights are fetched and gathered once for all of them, and its
            gradients reduced and spilled once (docs/guide/tiling.md). What a layer saves is of the whole batch. Else as
            ``token_tiles``, beside which it has no place.
        loss_only: True: a forward that records gradients returns None in place of logits, keys, values and every other
            output of two dimensions or more that a gradient reaches, beside its one loss. Under ``torch.no_grad()`` it
            returns all; ``model.eval()`` alone does not change that.
        compute: "inductor", or "eager" to run the same program with uncompiled segments, for debugging.
        plan: path of a file that ``zerograph plan -o`` wrote. Its decisions (stage, buckets and their residency,
            prefetch, recomputation) are used as they are, so those arguments have no place beside it. A training step
            whose parameters, dtypes or ranks differ from the planned ones is refused, as are ranks with different
            plans. Batch and sequence may differ.
        memory: device memory that a rank may use, ``"70GiB"`` or bytes; 6% of it are left free. The planner then
            chooses residency (``stage="auto"``), recomputation (``recompute="auto"``), offload (``offload="auto"``),
            ``bucket_size`` and ``prefetch``, unless they are given, for the least predicted step time that fits.
            Default at stage "auto": the free memory of a GPU, and the memory that torch's allocator holds there.
        machine: rates that predictions use: the name of a preset, or a file that ``zerograph bench -o`` wrote. Default:
            the preset closest to the device.

    Raises:
        ConfigError: an argument is wrong; says which and what it may be.
    """
    with errors_reach_users():  # Dynamo calls this function where it was given in place of a backend
        by_dynamo = bool(positional) and isinstance(positional[0], fx.GraphModule)
        require(not by_dynamo, "torch.compile got zerograph.backend as it is", "call it: backend=zerograph.backend()")
        require(not positional, f"zerograph.backend got {positional!r:.80} without names", "for example stage=3")
    return Backend(Config.of(**options))


def dynamo_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, **other: Any
) -> Callable[..., Any]:
    """Compile a frame: ``torch.compile(model, backend="zerograph", options={"stage": 3})`` calls this for each."""
    with errors_reach_users():
        _refuse_options(other)
        options = options if options is not None else {}
        named = isinstance(options, dict) and all(isinstance(name, str) for name in options)
        require(named, f"options must be arguments by name, got {options!r:.80}", 'options={"stage": 3}')
        config = Config.of(**options)
    roots = adopt.roots_of_call(gm, adopt.called_by(dynamo_backend))
    found = next((_BY_MODEL[root] for root in roots if root in _BY_MODEL), None)
    if found is None or found.config != config:
        found = Backend(config)
        found._given = dynamo_backend
    for root in roots:
        _BY_MODEL[root] = found
    return found(gm, example_inputs)


# torch.compile calls a backend given by name once per frame and keeps nothing in between, so the one Backend of a
# model is found by the model. Entries die with their models.
_BY_MODEL: weakref.WeakKeyDictionary[nn.Module, Backend] = weakref.WeakKeyDictionary()


def backend_of(model: nn.Module) -> Backend:
    """The backend of a model that was compiled with ``backend="zerograph"`` by name.

    Raises:
        ZeroGraphError: the model was not compiled that way, or not called yet.
    """
    model = adopt.model_given(model, "zerograph.backend_of")
    if model not in _BY_MODEL:
        raise ZeroGraphError("no backend belongs to this model", 'compile it with backend="zerograph" and call it once')
    return _BY_MODEL[model]


def shard(model: nn.Module, backend: Backend, device: torch.device | str | None = None) -> nn.Module:
    """Shard ``model`` for ``backend`` in place, before its first call; returns it.

    All ranks call this together. A model on the meta device stays there, sharded: materialize it with
    :func:`zerograph.materialize` before training.

    Args:
        model: a model that has not been called yet; wrappers such as DistributedDataParallel are refused.
        backend: the backend of this model, made by :func:`zerograph.backend`.
        device: where a model on the meta device will live; default: the accelerator when there is one, else the CPU.

    Returns:
        ``model`` itself.

    Raises:
        ConfigError: an argument has the wrong type, or the values of the model are not on ``device``.
        UnsupportedError: a parameter cannot be sharded.
    """
    model = adopt.model_given(model, "zerograph.shard")
    refuse_other_backends(backend, "zerograph.shard")
    adopt.refuse_wrapped([model])
    _BY_MODEL[model] = backend
    backend._adoption.shard([model], device_of(model, backend.config, device))
    return model


def refuse_other_backends(backend: object, function: str) -> None:
    """Raises:
    ConfigError: ``backend``, which ``function`` was given, is none of ours.
    """
    require_kind(backend, Backend, function, "give it what zerograph.backend(...) returns")


def materialize(model: nn.Module, init: Init = None, files: Files = None) -> nn.Module:
    """Give a model that was built under ``torch.device("meta")`` and sharded its memory and values; returns it.

    All ranks call this together, after ``zerograph.shard(model, backend)`` and before the first call of the model;
    optimizers made in between are pointed at the new parameters. Tensors that have values already keep them.

    From ``files`` (safetensors), each rank reads its own rows and nothing else. Tensors that no file holds (all of
    them, without files) are initialized module by module, children before parents, on rank 0 alone, by its random
    generator: the values are the same for any world size. Rank 0 holds one module's own tensors at a time, full; the
    other ranks only their rows.

    Args:
        model: a model that was given to :func:`zerograph.shard`.
        init: ``None`` or ``"reset_parameters"`` calls each module's ``reset_parameters()``. A function is called with
            each module after that, as ``model.apply(init)`` would; it may touch the module's own parameters and
            buffers only.
        files: safetensors files, one or several, that hold all parameters and persistent buffers; tied ones under any
            of their names. Only with an explicit ``init`` may some be missing. Values are widened to the parameter's
            dtype, never narrowed.

    Raises:
        ConfigError: ``init`` is no function, ``files`` are no paths, or the model has all its values already.
        CheckpointError: files cannot be read, or their names, shapes or dtypes are not the model's; on every rank.
        ShardingError: the model was not given to ``zerograph.shard``, or a module cannot be initialized.
        UnsupportedError: ``offload="auto"`` on an accelerator that cannot hold the shards.
    """
    model = adopt.model_given(model, "zerograph.materialize")
    given = files_to_read(init, files)
    owner = _BY_MODEL.get(model)
    if owner is None:
        return fill(model, None, init, given)
    placement = owner._planner.placement_before()
    leaves = is_disk(placement.parameters)
    if leaves and owner.config.offload == "auto" and owner._store.locations.host is not None:
        raise UnsupportedError(
            "the shards of the model take more memory than the device may use, and a search places them only when the "
            "model is traced",
            'give the placement: offload="parameters" with tier="host", or tier="nvme" and path=',
        )
    if leaves:
        owner._store.early.forget()
        owner._store.reserve({}, placement, owner.config.casts, MOMENTS, early=True)
    return fill(model, owner._adoption, init, given, owner._store if leaves else None)


def _refuse_options(options: Mapping[str, Any]) -> None:
    """torch.compile's own arguments that a backend object would ignore."""
    if options:
        raise ConfigError(
            f"torch.compile was given {', '.join(sorted(options))} beside a ZeroGraph backend",
            'pass arguments to zerograph.backend(...), or options= with backend="zerograph"',
        )
