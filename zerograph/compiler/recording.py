"""One training step as it really ran, in the schema of a forecast: spans on streams, and bytes over time.

Spans are those of the program's instructions, bytes those that torch's allocator handed out, both as torch's profiler
saw them. Measurements of a run make better forecasts: see :attr:`Recording.measured`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from zerograph.compiler.frame import Frame, last_frame
from zerograph.compiler.report import RecordedStep
from zerograph.compiler.under_way import UnderWay, length, seconds_of, under_way
from zerograph.core.errors import ZeroGraphError
from zerograph.core.files.runfile import Measured, Run, write_snapshot
from zerograph.core.instructions import (
    BeginUpdate,
    Compute,
    Computing,
    Free,
    Gather,
    Instruction,
    Move,
    Reduce,
    Update,
    View,
    WaitFetch,
    WaitGather,
    WaitReduce,
)
from zerograph.core.machine import Machine
from zerograph.core.param_bytes import sizes_of_states
from zerograph.core.plan import Plan
from zerograph.core.program import Program
from zerograph.core.timeline import WAIT, Forecast, Interval, Peak, Span, Stream, union
from zerograph.planner.programs.forecasts import ProgramForecast, forecast_programs, updates_are_modelled
from zerograph.planner.programs.updates import update_program
from zerograph.runtime.executor.telemetry import LABEL
from zerograph.runtime.memory_history import During, MemoryHistory
from zerograph.runtime.offload.shards import ShardStore
from zerograph.runtime.torch_private import local_tensor

NOT_COUNTED = (
    "buffers of the model, the batch, and whatever else existed before the recording began",
    "memory that the kernels' own code and the transport between ranks allocate",
)


@dataclass(frozen=True, slots=True)
class _Ran:
    """One instruction of a program, in nanoseconds of the profiler's clock."""

    program: Program
    instruction: Instruction
    start: int
    end: int

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


class Recording:
    """Records one training step; made by :meth:`Backend.record`, complete when that context ends.

    Attributes:
        forecast: the step in the schema of a forecast. The peak is of this rank.
        measured: seconds of each distinct segment, of each bucket's collectives and of what moved between tiers, to
            forecast with.
    """

    forecast: Forecast
    measured: Measured

    def __init__(
        self,
        frames: Sequence[Frame],
        params: Mapping[str, nn.Parameter],
        optimizers: Callable[[], Sequence[Optimizer]],
        machine: Machine,
        memory: bool = False,
    ) -> None:
        """Made before the step.

        Args:
            frames: the backend's frames, now and later; one has run.
            params: the backend's sharded parameters.
            optimizers: finds the optimizers that have stepped on them.
            machine: the machine that the step was planned for.
            memory: the device's allocations are remembered, for :meth:`save_memory`.

        Raises:
            ZeroGraphError: nothing was compiled yet, or the model is not sharded.
            ConfigError: torch remembers no allocations of the device.
        """
        last_frame(frames)
        if not params:
            raise ZeroGraphError(
                "there is nothing to record: on one process the model is not sharded", "use torch.profiler there"
            )
        self._frames, self._params, self._optimizers, self._machine = frames, params, optimizers, machine
        # Frames of one backend share device, communicator and telemetry: any frame's will do.
        self._runtime = next(frame.runtime for frame in frames if frame.runtime is not None)
        self._history = MemoryHistory(self._runtime.device) if memory else None
        self._snapshot: dict[str, Any] | None = None
        activities = [ProfilerActivity.CPU]
        if self._runtime.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, profile_memory=True)

    def __enter__(self) -> Recording:
        """Begin; nothing of the step may have run yet."""
        # The profiler does not see how what it has not seen allocated is freed: let go of it before.
        for frame in self._frames:
            if frame.runtime is not None:
                # Lets go of buckets that a step before left resident.
                frame.runtime.cache.enter("inference")
        if self._runtime.comm is not None:
            self._runtime.comm.trim()
        self._held = _held(self._params, self._optimizers(), self._runtime.store)
        self._profile.start()  # which raises inside of another profiler
        if self._history is not None:
            self._history.begin()
        self._runtime.telemetry.recording = True
        self._runtime.store.timings.begin()
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        """End, and work out what happened, unless the step failed.

        Raises:
            ZeroGraphError: not exactly one forward and one backward of one compiled frame ran in between.
        """
        self._runtime.telemetry.recording = False
        self._profile.stop()
        events = list(self._profile.profiler.kineto_results.events())  # type: ignore[union-attr]
        del self._profile  # and with it every event
        if self._history is not None:  # of a step that ran out of memory, too
            self._snapshot = self._history.end(list(self._during(events)), self._addresses())
        if failed is not None:
            self._runtime.store.timings.forget()
            return
        timings = self._runtime.store.timings.take()
        self._frame, ran, updates = self._instructions(events)
        optimizers = self._optimizers()
        self._state_sizes = _state_sizes(self._frame.plan, self._params, optimizers)
        inside = any(getattr(optimizer, "overlap", False) is True for optimizer in optimizers)
        self._plan = replace(self._frame.plan, overlap="backward") if inside else self._frame.plan
        program = update_program(self._plan, self._state_sizes)
        ran += [_Ran(program, program.instructions[0], *times) for times in updates]
        ran = _without_resident(ran)
        backward = next(r.start for r in ran if r.program.kind == "backward")
        moves = under_way(timings, self._frame.plan, backward)
        origin, ran = ran[0].start, _behind_waits(ran, moves)
        self.measured = _measured(ran, moves, self._frame.plan, list(self._frame.programs.values()))
        self.forecast = _forecast(ran, moves, self._memory(events), origin)

    def predicted(self, machine: Machine) -> ProgramForecast:
        """The forecast of the same programs with this run's seconds in place of the rates of ``machine``."""
        return self._simulated(machine, self.measured)

    def by_rates(self, machine: Machine) -> ProgramForecast:
        """The forecast of the same programs by the rates of ``machine`` alone, as it was before the run."""
        return self._simulated(machine, None)

    def _simulated(self, machine: Machine, measured: Measured | None) -> ProgramForecast:
        programs = [self._frame.programs["forward"], self._frame.programs["backward"]]
        return forecast_programs(programs, self._plan, machine, state_sizes=self._state_sizes, measured=measured)

    def beside_forecast(self) -> RecordedStep:
        """This run, its forecast by the machine's rates, and the one that its own seconds give."""
        found = self.predicted(self._machine)
        return RecordedStep(
            self.forecast.seconds,
            self.by_rates(self._machine).forecast.seconds,
            found.forecast.seconds,
            self._machine.title,
            self.forecast.peaks["device"].bytes,
            found.forecast.peaks["device"].bytes,
            found.resident,
        )

    def save(self, path: str | Path) -> None:
        """Write a file for ``zerograph show plan.json --measured PATH``."""
        run = Run(self._frame.plan.digest, self._runtime.device.type, self.forecast, self.measured)
        Path(path).write_text(run.to_json())

    def save_memory(self, path: str | Path) -> None:
        """Write the snapshot of the device's memory that pytorch.org/memory_viz and ``python -m
        torch.cuda._memory_viz`` read, also of a step that failed.

        Beside torch's traceback each allocation has the instruction while which it was made, and the parameter,
        gradient or optimizer state that lies there at the end of the recording.

        Raises:
            ZeroGraphError: it was not recorded.
            OSError: ``path`` cannot be written.
        """
        if self._snapshot is None:
            raise ZeroGraphError(
                "this recording has no snapshot of memory", "record with `backend.record(memory=True)`, to its end"
            )
        write_snapshot(self._snapshot, Path(path))

    def _during(self, events: Sequence[Any]) -> Iterator[During]:
        """Instructions and updates that ran, in the order of their beginnings."""
        for start, end, number, kind, index in sorted(_labelled(events)):
            if kind == "update":
                yield During(start, end, "optimizer update", kind, 0)
            else:
                program = self._frames[number].programs[kind]
                yield During(start, end, program.name(program.instructions[index]), kind, index)

    def _addresses(self) -> dict[int, str]:
        """By the address of its memory, each tensor of the training that is on the device."""
        found = {}
        for _, what, tensor in _tensors_of(self._params, self._optimizers()):
            local = local_tensor(tensor)
            if local.device.type == self._runtime.device.type and local.numel():
                found[local.data_ptr()] = what
        return found

    def _instructions(self, events: Sequence[Any]) -> tuple[Frame, list[_Ran], list[tuple[int, int]]]:
        """The frame that ran, its instructions, and when optimizers updated its parameters."""
        found: dict[tuple[int, str], list[_Ran]] = {}
        updates = list[tuple[int, int]]()
        for start, end, number, kind, index in _labelled(events):
            if kind == "update":
                updates.append((start, end))
                continue
            program = self._frames[number].programs[kind]
            found.setdefault((number, kind), []).append(_Ran(program, program.instructions[index], start, end))
        trained = [number for number, kind in found if kind == "backward"]
        ran = sorted((r for runs in found.values() for r in runs), key=lambda r: r.start)
        if len(trained) != 1 or {kind for _, kind in found} != {"forward", "backward"} or len(found) != 2:
            raise ZeroGraphError(
                f"a recording covers one forward and one backward of one graph, this one saw {len(found)} programs",
                "run exactly one training step inside `with backend.record() as run:`, after the model was compiled",
            )
        frame = self._frames[trained[0]]
        if len(ran) != sum(len(program.instructions) for program in frame.programs.values()):
            raise ZeroGraphError("more than one step ran during the recording", "record one step")
        return frame, ran, sorted(updates)

    def _memory(self, events: Sequence[Any]) -> list[tuple[int, int]]:
        """Bytes on the device from each moment on."""
        level, curve = self._held, list[tuple[int, int]]()
        wanted = _DEVICE_TYPES.get(self._runtime.device.type, DeviceType.PrivateUse1)
        for event in events:
            if event.name() == "[memory]" and event.device_type() == wanted:
                level += event.nbytes()
                curve.append((event.start_ns(), level))
        return curve


_DEVICE_TYPES: Mapping[str, DeviceType] = {"cpu": DeviceType.CPU, "cuda": DeviceType.CUDA}
"""As the profiler calls devices; accelerators that are no part of torch are "PrivateUse1"."""


def _labelled(events: Sequence[Any]) -> Iterator[tuple[int, int, int, str, int]]:
    """Of each instruction and update among ``events`` when it began and ended, in nanoseconds of the profiler's clock,
    and what its label says: frame, kind of program and index."""
    for event in events:
        # Of a GPU kineto tells each label twice, once with the time that its kernels took.
        if (match := LABEL.fullmatch(event.name())) and event.device_type() == DeviceType.CPU:
            start = event.start_ns()
            yield start, start + event.duration_ns(), int(match[1]), match[2], int(match[3])


def _held(params: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer], store: ShardStore) -> int:
    """Bytes of parameters, gradients and optimizer states that are on the device before the step, and of what the store
    keeps there for others, which torch's allocator does not see."""
    storages = {}
    held = _tensors_of(params, optimizers)
    for tensor in store.on_device((name, local_tensor(value)) for name, _, value in held):
        storage = tensor.untyped_storage()
        # By storage, not by tensor: reduced gradients of a bucket are views of one buffer.
        storages[storage.data_ptr()] = storage.nbytes()
    # What passes through the host's own memory is not on the device.
    passes = store.slots.bytes + store.fetches.bytes if store.locations.host is None else 0
    return sum(storages.values()) + passes


def _tensors_of(
    params: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
) -> Iterator[tuple[str, str, Tensor]]:
    """Parameters, gradients and optimizer states: whose each is, its name for people, and itself."""
    names = {id(param): name for name, param in params.items()}
    for name, param in params.items():
        yield name, f"parameter {name}", param
        if param.grad is not None:
            yield name, f"gradient of {name}", param.grad
    for optimizer in optimizers:
        for owner, state in optimizer.state.items():
            name = names.get(id(owner), "")
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield name, f"{key} of {name or 'another parameter'}", value


def _state_sizes(plan: Plan, params: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> dict[str, int]:
    """Bytes that ``optimizers`` keep of the largest shard of each parameter in their groups, by name: of the tensors of
    its shape, each in its own dtype. Without an optimizer all that train are updated by one that keeps nothing."""
    trained = [p for bucket in plan.buckets for p in bucket.params if p.trainable]
    if not optimizers:
        return sizes_of_states(trained, 0)
    groups = itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
    updated = {id(param) for group in groups for param in group["params"]}
    state_sizes = {}
    for each in trained:
        param = params[each.name]
        if id(param) in updated:
            # A step counter is a scalar: of a scalar parameter it would pass for a moment.
            states = (value for optimizer in optimizers for value in optimizer.state.get(param, {}).values())
            moments = (v for v in states if isinstance(v, Tensor) and v.shape == param.shape and param.ndim)
            state_sizes[each.name] = each.chunk_elements * sum(v.element_size() for v in moments)
    return state_sizes


def _measured(ran: Sequence[_Ran], moves: Sequence[UnderWay], plan: Plan, programs: Sequence[Program]) -> Measured:
    segments: dict[str, list[float]] = {}
    gathers: dict[int, list[float]] = {}
    reduces: dict[int, list[float]] = {}
    for run in ran:
        match run.instruction:
            case Compute(segment=segment):
                segments.setdefault(run.program.segments[segment].digest, []).append(run.seconds)
            case Gather(bucket=bucket):
                gathers.setdefault(bucket, []).append(run.seconds)
            case Reduce(bucket=bucket):
                reduces.setdefault(bucket, []).append(run.seconds)
            case WaitGather(bucket=bucket):
                gathers[bucket][-1] += run.seconds
            case WaitReduce(bucket=bucket):
                reduces[bucket][-1] += run.seconds
    return Measured(
        segments={digest: fmean(seconds) for digest, seconds in segments.items()},
        gathers={bucket: fmean(seconds) for bucket, seconds in gathers.items()},
        reduces={bucket: fmean(seconds) for bucket, seconds in reduces.items()},
        update=_beside(ran, moves if updates_are_modelled(plan) else ()),
        moves=seconds_of(moves, programs),
    )


def _beside(ran: Sequence[_Ran], moves: Sequence[UnderWay]) -> float:
    """Seconds of updates in which nothing of ``moves`` moved for them."""
    updates = [(run.start, run.end) for run in ran if isinstance(run.instruction, Update)]
    moving = union(times for move in moves if move.phase == "update" for times in move.times)
    return length(union([*updates, *moving])) - length(moving)


def _without_resident(ran: Sequence[_Ran]) -> list[_Ran]:
    """The instructions that ran, but for the gathers of buckets that were resident already."""
    unsharded: set[int] = set()
    moved = []
    for run in ran:
        instruction = run.instruction
        # It returned at once: as a sample of the collective's time it would halve the mean.
        if isinstance(instruction, (Gather, WaitGather)) and instruction.bucket in unsharded:
            continue
        moved.append(run)
        if isinstance(instruction, WaitGather):
            unsharded.add(instruction.bucket)
        elif isinstance(instruction, Free) and not instruction.resident:
            unsharded.discard(instruction.bucket)
    return moved


def _behind_waits(ran: Sequence[_Ran], moves: Sequence[UnderWay]) -> list[_Ran]:
    """``ran``, where a gather that first waited for an update begins behind that: as a part of the collective's time it
    would be counted once more."""
    waits = [times for move in moves if move.what == WAIT for times in move.times]

    def behind(run: _Ran) -> int:
        own = (end for begin, end in waits if run.start <= (begin + end) // 2 <= run.end)
        return int(min(max(own, default=run.start), run.end)) if isinstance(run.instruction, Gather) else run.start

    return [replace(run, start=behind(run)) for run in ran] if waits else list(ran)


def _forecast(
    ran: Sequence[_Ran], moves: Sequence[UnderWay], memory: Sequence[tuple[int, int]], origin: int
) -> Forecast:
    """The run as a timeline that starts at ``origin``. A collective has two spans: start and wait."""
    timed = [*_spans(ran), *(span for move in moves for span in move.spans())]
    # Of an update that an earlier step began, some may have ended before.
    there = sorted((each for each in timed if each[0][1] > origin), key=lambda each: each[0])
    spans = [
        replace(span, task=task, start=max(0, begin - origin) / 1e9, end=(end - origin) / 1e9)
        for task, ((begin, end), span) in enumerate(there)
    ]
    return Forecast(tuple(spans), *_curve(spans, memory, origin), not_counted=NOT_COUNTED)


def _spans(ran: Sequence[_Ran]) -> Iterator[tuple[Interval, Span]]:
    """Each instruction that occupied a stream, without task, start and end."""
    for run in ran:
        instruction, program = run.instruction, run.program
        # Timings say when moves were under way: a program only begins them.
        if isinstance(instruction, (Free, View, WaitFetch, BeginUpdate, Move)):
            continue
        segment = program.segments[instruction.segment] if isinstance(instruction, Compute) else None
        yield (
            (run.start, run.end),
            Span(
                0,
                program.name(instruction),
                instruction.stream or _WAITS[type(instruction)],
                0.0,
                0.0,
                program.module(instruction),
                instruction.source if isinstance(instruction, Compute) else "",
                key=segment.digest if segment is not None else "",
                flops=segment.flops if segment is not None else 0,
                operation=instruction.operation,
                phase=program.kind,
                bucket=-1 if isinstance(instruction, Computing) else instruction.bucket,
                label="" if segment is not None else program.label(instruction),
            ),
        )


_WAITS: Mapping[type, Stream] = {WaitGather: "gather", WaitReduce: "reduce"}
"""The streams that waits are for."""


def _curve(
    spans: Sequence[Span], memory: Sequence[tuple[int, int]], origin: int
) -> tuple[dict[Any, tuple[tuple[float, int], ...]], dict[Any, Peak]]:
    curve: list[tuple[float, int]] = []
    for moment, level in memory:
        time = max(0.0, (moment - origin) / 1e9)
        if curve and curve[-1][0] == time:
            curve.pop()
        curve.append((time, level))
    if not curve:
        return {}, {}
    time, most = max(curve, key=lambda point: point[1])
    # Allocations before the first instruction (autograd's) fall to that one.
    during = next((s for s in reversed(spans) if s.start <= time), spans[0])
    return {"device": tuple(curve)}, {"device": Peak(most, during.task, during.name, during.module, during.source)}
