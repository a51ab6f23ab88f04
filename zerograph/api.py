"""The backend object that ``torch.compile`` calls."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from zerograph.compile import compile_frame
from zerograph.compiler.agreement import Agreement
from zerograph.compiler.frame_plan import Planner
from zerograph.compiler.parameter_mutations import refuse_mutations
from zerograph.compiler.recording import Recording
from zerograph.compiler.report import BucketReport, Report
from zerograph.compiler.segments import SegmentCache
from zerograph.compiler.unfold import Joint, Repeat
from zerograph.core.config import Config
from zerograph.core.errors import ConfigError, ShardingError, UnsupportedError, ZeroGraphError
from zerograph.core.plan import Plan
from zerograph.frame import Frame
from zerograph.optim.check import OptimizerCheck
from zerograph.planner import refuse_world_size
from zerograph.runtime.comm import Communicator, connect
from zerograph.runtime.entry import reason_of
from zerograph.runtime.hold import GradientHold
from zerograph.runtime.program import Program
from zerograph.runtime.residency import StepCount
from zerograph.runtime.telemetry import Telemetry
from zerograph.sharding import adopt
from zerograph.sharding.gathered import is_open
from zerograph.sharding.grad_scaler import find_inf_on_all_ranks
from zerograph.sharding.model_copies import await_updates, take_over
from zerograph.sharding.optimizer_states import early_states
from zerograph.sharding.parametrization import other_names, resolve_mesh, shard_parameters
from zerograph.symbolic import Name

log = logging.getLogger(__name__)


class Backend:
    """Compiles the frames of one model; made by :func:`backend`.

    Attributes:
        config: the validated arguments.
        frames: every frame compiled so far, in order.
        params: the outward faces this backend made, by name.
        tied: of each that the model has several names for, the other ones.
        world_size: ranks sharded over; 1 until the first call.
        agreement: how ranks agree; None where there is one, and where they are simulated.
        runs: whether programs are executed; a dry run stops when they exist.
        open_sizes: traced sizes of what stays open; a dry run then stops once it has the step at all sizes.
        folds: whether a few of many layers that are alike are traced in place of all; tests compare the two.
        unfolding: in a dry run, what makes the graph of a few layers that of all.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.frames: list[Frame] = []
        self.params: dict[str, nn.Parameter] = {}
        self.tied: dict[str, tuple[str, ...]] = {}
        self.segments = SegmentCache(config.compute)
        self.telemetry = Telemetry()
        self._known: set[int] = set()
        self.steps = StepCount(self._known)
        self.hold = GradientHold(self.params)
        self.communicator: Communicator | None = None
        self.world_size = 1
        self.runs = True
        self.open_sizes: Mapping[Name, int] | None = None
        self.folds = True
        self.unfolding: Callable[[Joint], Repeat] | None = None
        self.compile_seconds = 0.0
        self._replaced = WeakIdKeyDictionary()
        self._optimizers = OptimizerCheck(self._known, self._replaced, self._skipped, self.hold)
        self._mesh: Any = None
        self._device: torch.device | None = None
        self._traced_in_vain = False
        self.agreement: Agreement | None = None
        self._recording: Recording | None = None
        self.planner = Planner(self)
        self._breaks_before = dict(torch._dynamo.utils.counters["graph_break"])
        adopt.before_first_trace(_adopt_early)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Dynamo's entry: adopt the model on its first call, then compile the frame."""
        with adopt.unwrapped():
            _refuse_options(options)
            return self._compile(gm, example_inputs)

    def _compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        adopt.refuse_wrapped(adopt.modules_on_stack())  # DDP hands over pieces of its graph, without parameters
        params = adopt.parameters(gm)
        if self.runs:
            _refuse_meta(params)
        foreign = [p for p in params if id(p) not in self._known]
        if foreign:
            if is_open(foreign):
                self._refuse_first_call()
                return gm  # inside zerograph.gathered: plain parameters, on this rank alone
            roots = adopt.roots_of_call(gm)
            adopt.refuse_wrapped(m for root in roots for m in root.modules())
            if self.shard(roots, foreign[0].device):
                self._traced_in_vain = True
                raise adopt.Retrace
            self._refuse_foreign(foreign)
        adopt.match_rows_alone()
        refuse_mutations(gm)
        self.planner.own = params
        if self._traced_in_vain:
            gc.collect()  # the abandoned trace holds the full parameters in reference cycles
            self._traced_in_vain = False
        return self._compile_together(gm, example_inputs)

    def _compile_together(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile; other ranks, who may wait to compare, hear when that fails here."""
        if self.agreement is None or self.communicator is None:
            return compile_frame(self, gm, example_inputs)
        code = adopt.traced_function()
        try:
            self.communicator.rejoin()
            self.agreement.meeting.report(f"compiles {code}")
            compiled = compile_frame(self, gm, example_inputs)
        except BaseException as error:
            self.communicator.abort(f"while compiling {code}: {reason_of(error)}")
            raise
        self.agreement.meeting.report(f"compiled {code}")
        return compiled

    def adopt_early(self) -> None:
        """Shard the model that is being called before Dynamo traces it, instead of after; the first call only."""
        root = adopt.called_module() if self._device is None else None
        params = list(root.parameters()) if root is not None else []
        if root is None or not params or is_open(params) or any(p.is_meta or is_lazy(p) for p in params):
            return  # what is to be said about them is said where a graph reads them
        with adopt.unwrapped():
            adopt.refuse_wrapped(root.modules())
            self.shard([root], params[0].device)

    @torch.inference_mode(False)  # inference tensors could never be trained
    def shard(self, roots: Sequence[nn.Module], device: torch.device) -> bool:
        """Give the parameters of ``roots`` their faces; returns whether there was anything to do.

        At world size 1 without a compute dtype there is not: the model stays as it is.
        """
        self._bind(device)
        if self.config.plan is not None:
            refuse_world_size(self.config.plan, self.world_size)
        if self.world_size == 1 and self.config.dtype is None:
            return False
        before = tuple(p for root in roots for p in root.parameters())  # not a list: those are rewritten
        objects = adopt.live(nn.Module, Optimizer)
        if self.agreement is not None and any(id(p) not in self._known for p in before):
            self.agreement.require_same(_given(self.config, roots, objects))
        new = take_over(roots, self.config, self._mesh, self.params)
        new |= shard_parameters(roots, self.config, self._mesh, objects, {**self.params, **new})
        await_updates(roots, objects)
        self.params |= new
        self.tied |= other_names(roots, new)
        self._known.update(id(p) for p in new.values())
        self._replaced.update((p, None) for p in before if id(p) not in self._known)
        if new:
            log.info("stage %s: sharded %d parameters over %d ranks", self.config.stage, len(new), self.world_size)
        return bool(new)

    @property
    def device(self) -> torch.device:
        """Where the shards live; the CPU until the backend has seen a model."""
        return self._device or torch.device("cpu")

    def replace(self, new: Mapping[int, nn.Parameter]) -> None:
        """Go on with other outward faces, given by ``id`` of those they replace."""
        for name, old in self.params.items():
            if id(old) in new:
                self._known.discard(id(old))
                self.params[name] = new[id(old)]
        self._known.update(id(p) for p in new.values())

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are fresh backends with the same arguments: programs belong to one model."""
        return (Backend, (self.config,))

    def _skipped(self) -> list[nn.Parameter]:
        """Parameters of models given to this backend that nothing has sharded."""
        if self._ranks() == 1:
            return []
        return [p for m in adopt.modules_given_to(self) for p in m.parameters() if id(p) not in self._known]

    def _ranks(self) -> int:
        """Ranks to shard over, known before the first call too."""
        if self.config.mesh is not None:
            return self.config.mesh.size()
        return dist.get_world_size() if dist.is_initialized() else 1

    def _refuse_first_call(self) -> None:
        """Dynamo would keep the plain code for calls outside; on one rank that is all there is."""
        if not self.params and self._ranks() > 1:
            raise ShardingError(
                "the first call of a compiled model is inside zerograph.gathered(), where parameters are plain",
                "call it once outside before, or zerograph.shard(model, backend)",
            )

    def _refuse_foreign(self, params: Sequence[nn.Parameter]) -> None:
        """Parameters of no module on the call's path would train unsynchronized."""
        if self.world_size > 1:
            raise UnsupportedError(
                f"the compiled code reads {len(params)} parameter(s) of no module that ZeroGraph can find, "
                f"the first of shape {list(params[0].shape)}",
                "compile the module that owns them, or call zerograph.shard(module, backend) first; "
                "models wrapped or sharded by something else are not supported",
            )

    def _bind(self, device: torch.device) -> None:
        """Find the mesh and connect to the other ranks, once."""
        if self._device is not None:
            return
        mesh, world_size = resolve_mesh(self.config, device.type), 1
        communicator, agreement = None, None
        if mesh is not None and mesh.size() > 1:
            group, world_size = mesh.get_group(), mesh.size()
            find_inf_on_all_ranks()
            agreement = Agreement.open(group, device, self.config.plan)
            communicator = connect(group, device, agreement.meeting if agreement is not None else None)
        self.planner.look_at(device, agreement)
        # Nothing of it before all has worked: a failed first call may be tried again.
        self._mesh, self.world_size, self._device = mesh, world_size, device
        self.communicator, self.agreement = communicator, agreement

    def new_frame(self) -> Frame:
        """A frame that is about to be compiled."""
        self.frames.append(Frame(self, len(self.frames), adopt.traced_function()))
        return self.frames[-1]

    def lowered(self, seconds: float) -> None:
        """A graph became a program, ``seconds`` after its passes began."""
        self.compile_seconds += seconds

    def compiled(self, frame: Frame) -> None:
        """All programs of ``frame`` can run: all ranks must agree on them before one does."""
        if self.agreement is not None:
            for program in frame.programs.values():
                self.agreement.check(frame.code, program)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Hold gradients back on each rank, whole, until the next backward outside of this context.

        As with DistributedDataParallel, the reduction then covers all of them at once. Costs the memory of the full
        gradients at every stage.
        """
        before, self.hold.active = self.hold.active, True
        try:
            yield
        finally:
            self.hold.active = before

    @contextlib.contextmanager
    def record(self) -> Iterator[Recording]:
        """Record one training step: forward, backward and, if wanted, the optimizer's step.

        The compiled model must have run before. torch's profiler runs meanwhile, and on an accelerator every
        instruction is waited for, so that the step is slower than others. :meth:`report` shows the last recording.

        Raises:
            ZeroGraphError: nothing was compiled yet, or something else than one step ran.
        """
        self._last_frame()
        if not self.params:
            raise ZeroGraphError(
                "there is nothing to record: on one process the model is not sharded", "use torch.profiler there"
            )
        recording = Recording(self)
        try:
            recording.start()
            yield recording
        except BaseException:
            recording.stop(failed=True)
            raise
        recording.stop()
        self._recording = recording

    def optimizers(self) -> list[Optimizer]:
        """Those that have stepped on parameters of this backend."""
        return self._optimizers.stepped()

    @property
    def plan(self) -> Plan:
        """The plan of the last training frame (of the last frame, when there is none).

        Raises:
            ZeroGraphError: nothing was compiled yet.
        """
        return self._last_frame().plan

    @property
    def program(self) -> dict[str, Program]:
        """The programs of that frame by kind: "forward" and "backward", or "inference"."""
        return self._last_frame().programs

    def _last_frame(self) -> Frame:
        compiled = [f for f in self.frames if f.programs]
        if not compiled:
            raise ZeroGraphError("nothing was compiled yet", "call the compiled model once")
        training = [f for f in compiled if "forward" in f.programs and f.plan.buckets]
        return (training or compiled)[-1]

    def report(self) -> Report:
        """What was decided and what happened so far."""
        frames = [f for f in self.frames if f.programs]
        breaks = Counter(torch._dynamo.utils.counters["graph_break"]) - Counter(self._breaks_before)
        return Report(
            stage=self.config.stage,
            world_size=self.world_size,
            transport=self.communicator.name if self.communicator is not None else "no communication",
            buckets=tuple(
                BucketReport(f.index, b.name, tuple(p.name for p in b.params), b.gathered_bytes, b.residency)
                for f in frames
                for b in f.plan.buckets
            ),
            programs=sum(len(f.programs) for f in frames),
            segments=self.segments.requested,
            distinct_segments=len(self.segments.callables),
            compile_seconds=self.compile_seconds,
            graph_breaks=dict(breaks),
            runs=dict(self.telemetry.runs),
            peak_whole_buckets=self.telemetry.peak_whole,
            recorded=self._recording.beside_forecast() if self._recording is not None else None,
        )


def _adopt_early(compiler: object) -> None:
    if isinstance(compiler, Backend):
        compiler.adopt_early()


def backend(**options: Any) -> Backend:
    """A ``torch.compile`` backend that shards training over ranks (ZeRO).

    Args:
        stage: 0 (nothing sharded, like DistributedDataParallel), 1 (optimizer states), 2 (gradients too),
            3 (parameters too), or "auto": sharded as at 3, with as many parameters kept whole from forward to backward
            as make the step faster and fit ``memory``.
        mesh: 1-D ``DeviceMesh``; default: all ranks of the default process group, or one process without any.
        dtype: compute and gather dtype; parameters stay as they are. Default: each parameter's own.
        reduce_dtype: dtype gradients are summed over ranks in; default float32 under 16-bit compute.
        bucket_size: bytes of gathered parameters per collective: an int, or a text such as ``"32MiB"``.
        prefetch: buckets gathered ahead, where memory allows; at stage 3 at most ``prefetch + 1`` are whole at a time.
        recompute: activations computed again in the backward instead of saved: "auto" (what the partitioner finds
            cheap; with ``memory`` also as many whole layers as are needed to fit), "none" (all are saved), "full" (of
            every repeated layer only the inputs are saved, as with ``torch.utils.checkpoint`` around each), or a number
            from 0 to 1: that share of the layers fully. Layers are modules with a number in their name. Regions of the
            user's own ``torch.utils.checkpoint`` stay as they are.
        offload: "none", "optimizer" (its states leave the device), "gradients" (those too), "parameters" (all of it) or
            "auto". It is planned and forecast by ``zerograph plan --offload``, and cannot be run yet: anything but
            "none" is refused.
        tier: where that goes, "host" or "nvme"; default: whatever the planner finds faster.
        compute: "inductor", or "eager" to run the same program with uncompiled segments, for debugging.
        plan: path of a file that ``zerograph plan -o`` wrote. Its decisions (stage, buckets and their residency,
            prefetch, recomputation) are used as they are, so those arguments have no place beside it. A training step
            with other parameters, dtypes or ranks than those that were planned is refused, as are ranks with different
            plans. Batch and sequence may differ.
        memory: device memory that a rank may use, ``"70GiB"`` or bytes; 6% of it are left free. Whatever of residency
            (``stage="auto"``), recomputation (``recompute="auto"``), ``bucket_size`` and ``prefetch`` is not given is
            then chosen for the least predicted step time that fits. Default at stage "auto": all of a GPU.
        machine: what predictions go by: the name of a preset, or a file that ``zerograph bench -o`` wrote. Default:
            the preset closest to the device.

    Raises:
        ConfigError: an argument is wrong; says which and what it may be.
    """
    return Backend(Config.of(**options))


def _given(config: Config, roots: Sequence[nn.Module], objects: Sequence[Any]) -> list[str]:
    """What must be the same on all ranks before anything is sharded, a line each. Budgets and batches may differ."""
    names = ("stage", "dtype", "reduce_dtype", "bucket_size", "prefetch", "recompute")
    lines = [f"{name}={getattr(config, name)}" for name in names]
    for root in roots:
        lines += [f"parameter {n} {tuple(p.shape)} {p.dtype}" for n, p in root.named_parameters()]
        lines += [f"buffer {n} {tuple(b.shape)} {b.dtype}" for n, b in root.named_buffers()]
        lines += early_states(dict(root.named_parameters()), objects)
    return lines


def dynamo_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, **other: Any
) -> Callable[..., Any]:
    """What ``torch.compile(model, backend="zerograph", options={"stage": 3})`` calls, per frame."""
    with adopt.unwrapped():
        _refuse_options(other)
        config = Config.of(**(options or {}))
    roots = adopt.roots_of_call(gm)
    found = next((_BY_MODEL[root] for root in roots if root in _BY_MODEL), None)
    if found is None or found.config != config:
        found = Backend(config)
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
    model = getattr(model, "_orig_mod", model)
    if model not in _BY_MODEL:
        raise ZeroGraphError("no backend belongs to this model", 'compile it with backend="zerograph" and call it once')
    return _BY_MODEL[model]


def shard(model: nn.Module, backend: Backend, device: torch.device | str | None = None) -> nn.Module:
    """Shard ``model`` for ``backend`` in place, before its first call; returns it.

    All ranks call this together. A model on the meta device stays there, sharded: materialize it with
    :func:`zerograph.materialize` before training.

    Args:
        device: where a model on the meta device will live; default: the accelerator when there is one, else the CPU.

    Raises:
        UnsupportedError: a parameter that cannot be sharded.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(backend, Backend):
        raise ConfigError(f"zerograph.shard got {backend!r}", "give it what zerograph.backend(...) returns")
    adopt.refuse_wrapped(model.modules())
    _BY_MODEL[model] = backend
    backend.shard([model], _home(model, backend, device))
    return model


def _refuse_options(options: Mapping[str, Any]) -> None:
    """torch.compile's own arguments that a backend object would ignore."""
    if options:
        raise ConfigError(
            f"torch.compile was given {', '.join(sorted(options))} beside a ZeroGraph backend",
            'pass arguments to zerograph.backend(...), or options= with backend="zerograph"',
        )


def _refuse_meta(params: Sequence[nn.Parameter]) -> None:
    empty = sum(p.is_meta for p in params)
    if empty:
        raise ShardingError(
            f"{empty} of the {len(params)} parameters that the compiled code reads are on the meta device",
            "call zerograph.shard(model, backend) and then zerograph.materialize(model) before the first call",
        )


def _home(model: nn.Module, backend: Backend, device: torch.device | str | None) -> torch.device:
    """The device that the shards of ``model`` belong on."""
    if device is None:
        device = next((p.device for p in model.parameters() if not p.is_meta), None)
    if device is None and backend.config.mesh is not None:
        device = backend.config.mesh.device_type
    device = torch.device(device or torch.accelerator.current_accelerator() or "cpu")
    if device.index is None and device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return device
