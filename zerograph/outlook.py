"""What a step will do, from the very programs that will run: tasks on streams, and the memory they hold.

One step is a forward, its backward and the optimizer's update. Instructions become tasks; a register's memory is taken
when it is written and given back after its last reader; what the forward saves, the backward gives back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zerograph.core.machine import Machine
from zerograph.core.plan import Plan
from zerograph.core.planfile import Holding
from zerograph.core.runfile import Measured
from zerograph.core.timeline import NOT_COUNTED, Forecast, Stream
from zerograph.planner.process_memory import Resident, resident
from zerograph.planner.rates import Rates, gathered_bytes, reduced_bytes, state_bytes
from zerograph.planner.simulate import Memory, Task, simulate
from zerograph.runtime.program import (
    Compute,
    Free,
    Gather,
    Instruction,
    Program,
    Reduce,
    Segment,
    WaitGather,
    WaitReduce,
)


def task_of(plan: Plan, step: Instruction | None, kind: str) -> tuple[Stream | None, str, str]:
    """The stream, name and module of the task that ``step`` is in a program of that kind; None is the update.

    What only lets go of memory has no stream.
    """
    match step:
        case None:
            return "compute", "optimizer update", "optimizer"
        case Compute(module=module):
            return "compute", f"{kind} {module or 'outside of layers'}", module
        case Gather(bucket=bucket) | WaitGather(bucket=bucket):
            return "gather", f"gather {plan.buckets[bucket].name}", plan.buckets[bucket].name
        case Reduce(bucket=bucket) | WaitReduce(bucket=bucket):
            return "reduce", f"reduce {plan.buckets[bucket].name}", plan.buckets[bucket].name
        case Free():
            return None, "", ""


@dataclass(frozen=True, slots=True)
class Outlook:
    """A forecast, what its memory is used for, and, on a CPU, what the process grows by."""

    forecast: Forecast
    holdings: tuple[Holding, ...]
    resident: Resident | None = None


def outlook(
    programs: Sequence[Program],
    plan: Plan,
    machine: Machine,
    *,
    moments: int = 2,
    measured: Measured | None = None,
) -> Outlook:
    """Simulate ``programs`` (forward and backward of one frame, or one inference) on one rank of ``machine``.

    Args:
        moments: float tensors that the optimizer keeps per parameter: 2 for Adam, 0 for plain SGD.
        measured: seconds that replace those that follow from the machine's rates.
    """
    builder = _Builder(plan, machine, measured or Measured())
    states = _states(plan, moments)
    builder.holdings += states
    for program in programs:
        builder.add(program)
    if any(program.kind == "backward" for program in programs):
        builder.add_update(moments)
    builder.finish()
    held: Memory = tuple(("device", holding.bytes) for holding in states)
    forecast = simulate(builder.tasks, held, NOT_COUNTED)
    peak = forecast.peaks.get("device")
    grows = resident(programs, plan, peak.bytes) if peak is not None and machine.device == "cpu" else None
    return Outlook(forecast, tuple(builder.holdings), grows)


def _states(plan: Plan, moments: int) -> list[Holding]:
    """What lies on the device between steps: shards, and the optimizer's moments. Gradients come with the backward."""
    params = [p for bucket in plan.buckets for p in bucket.params]
    shards, states = state_bytes(params, plan.world_size, moments)
    found = [Holding("shards of parameters", "param", "device", shards, -1, -1)]
    return found + ([Holding("optimizer states", "state", "device", states, -1, -1)] if states else [])


@dataclass(slots=True)
class _Held:
    """Memory of one storage while it lives."""

    name: str
    kind: str
    bytes: int
    task: int
    module: str
    source: str


class _Builder:
    def __init__(self, plan: Plan, machine: Machine, measured: Measured) -> None:
        self.plan, self.measured = plan, measured
        self.rates = Rates(machine, plan.world_size, plan.compute_dtype)
        self.tasks: list[Task] = []
        self.holdings: list[Holding] = []
        self.whole: dict[int, int] = {}  # bucket -> task that gathered it, while it is kept whole
        self.saved: dict[str, _Held] = {}  # by name: what a forward returned

    def add(self, program: Program) -> None:
        """The tasks of one program, in order."""
        run = _Run(self, program)
        for step in program.instructions:
            run.instruction(step)
        run.finish()

    def task(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def amend(self, index: int, *, takes: Memory = (), gives: Memory = ()) -> None:
        """Let a task that exists take or give more."""
        old = self.tasks[index]
        self.tasks[index] = old._replace(takes=old.takes + takes, gives=old.gives + gives)

    def hold(self, held: _Held, last: int) -> None:
        if held.bytes:
            self.holdings.append(
                Holding(held.name, held.kind, "device", held.bytes, held.task, last, held.module, held.source)  # type: ignore[arg-type]
            )

    def add_update(self, moments: int) -> None:
        """One pass over parameters, gradients and states; gradients go afterwards (``zero_grad``)."""
        rates = self.rates.update((p for bucket in self.plan.buckets for p in bucket.params), moments)
        seconds = self.measured.update if self.measured.update is not None else rates
        reduces = [i for i, task in enumerate(self.tasks) if task.stream == "reduce"]
        _, name, module = task_of(self.plan, None, "")
        self.task(Task(name, "compute", seconds, tuple(reduces[-1:]), module=module))

    def finish(self) -> None:
        """What nothing gave back lives to the end."""
        for held in {id(h): h for h in self.saved.values()}.values():
            self.hold(held, -1)


class _Run:
    """One program's registers on their way through its instructions."""

    def __init__(self, builder: _Builder, program: Program) -> None:
        self.builder, self.program = builder, program
        self.contents = program.contents
        self.readers: dict[int, int] = {}  # storage -> registers of it that are alive
        self.held: dict[int, _Held] = {}  # storage -> its memory
        self.ready: dict[int, int] = {}  # register -> task that writes it
        self.last = len(builder.tasks) - 1
        self.reducing: dict[int, tuple[int, ...]] = {}  # pending reduction -> registers that die with it
        self.waits: set[int] = set()  # what the next segment waits for, whether it reads it or not
        self.same: dict[int, int] = {}  # storage of an input -> an earlier one: several views may have been saved
        first: dict[int, int] = {}
        for register in range(program.inputs):
            content = self.contents[register]
            saved = builder.saved.pop(content.name, None)
            if saved is not None:
                self.same[content.storage] = first.setdefault(id(saved), content.storage)
                self.held[first[id(saved)]] = saved
            self._read(register)

    def _storage(self, register: int) -> int:
        storage = self.contents[register].storage
        return self.same.get(storage, storage)

    def _read(self, register: int) -> None:
        storage = self._storage(register)
        self.readers[storage] = self.readers.get(storage, 0) + 1

    def instruction(self, step: object) -> None:
        match step:
            case Compute():
                self._compute(step)
            case Gather():
                self._gather(step)
            case WaitGather():
                self.waits.add(self.ready[step.pending])
                self.ready.update(dict.fromkeys(step.outs, self.ready[step.pending]))
            case Free():
                self._free(step)
            case Reduce():
                self._reduce(step)
            case WaitReduce():
                self._wait_reduce(step)

    def _compute(self, step: Compute) -> None:
        segment = self.program.segments[step.segment]
        after = tuple(sorted(self.waits | {self.ready[r] for r in step.args if r in self.ready}))
        self.waits.clear()
        _, name, _ = task_of(self.builder.plan, step, self.program.kind)
        seconds = self._seconds(segment)
        temporary: Memory = (("device", segment.temporary),) if segment.temporary else ()
        where = (step.module, step.source, segment.digest, segment.flops)
        index = self.builder.task(Task(name, "compute", seconds, after, temporary, temporary, *where))
        if segment.temporary:
            work = _Held("work of this segment", "temporary", segment.temporary, index, step.module, step.source)
            self.builder.hold(work, index)
        self.last = index
        for register in step.outs:
            self._write(register, index, step.module, step.source)
        self._die(step.dead, index)

    def _seconds(self, segment: Segment) -> float:
        known = self.builder.measured.segments.get(segment.digest)
        if known is not None:
            return known
        return self.builder.rates.compute(segment.flops, segment.moved)

    def _write(self, register: int, index: int, module: str, source: str) -> None:
        content, storage = self.contents[register], self._storage(register)
        self.ready[register] = index
        self._read(register)
        if storage in self.held or storage < self.program.inputs:
            return
        self.held[storage] = _Held(content.name, content.kind, content.bytes, index, module, source)
        self.builder.amend(index, takes=(("device", content.bytes),))

    def _die(self, registers: Iterable[int], index: int) -> None:
        for register in registers:
            storage = self._storage(register)
            self.readers[storage] = self.readers.get(storage, 1) - 1
            held = self.held.get(storage)
            if self.readers[storage] == 0 and held is not None:
                del self.held[storage]
                self.builder.hold(held, index)
                self.builder.amend(index, gives=(("device", held.bytes),))

    def _gather(self, step: Gather) -> None:
        builder = self.builder
        kept = builder.whole.get(step.bucket)
        if kept is not None:
            self.ready[step.out] = kept
        else:
            size = gathered_bytes(step.params, builder.plan.world_size)
            seconds = builder.measured.gathers.get(step.bucket, builder.rates.collective(size))
            after = (self.last,) if self.last >= 0 else ()
            _, task, name = task_of(builder.plan, step, self.program.kind)
            takes: Memory = (("device", size),)
            index = builder.task(Task(task, "gather", seconds, after, takes, module=name, key=str(step.bucket)))
            builder.whole[step.bucket] = self.ready[step.out] = index
            self._stall(index)
            self.held[-1 - step.bucket] = _Held(name, "gathered", size, index, name, "")
        self._die(step.dead, self.last if self.last >= 0 else 0)

    def _free(self, step: Free) -> None:
        residency = self.builder.plan.buckets[step.bucket].residency
        if residency == "use" or (residency == "backward" and self.program.kind == "backward"):
            self.builder.whole.pop(step.bucket, None)
            held = self.held.pop(-1 - step.bucket, None) or self.builder.saved.pop(_kept_name(step.bucket), None)
            if held is not None:
                self.builder.hold(held, self.last)
                self.builder.amend(self.last, gives=(("device", held.bytes),))

    def _reduce(self, step: Reduce) -> None:
        builder = self.builder
        seconds = builder.measured.reduces.get(step.bucket, builder.rates.collective(reduced_bytes(step.params)))
        after = tuple(sorted({self.ready[r] for r in step.grads if r in self.ready}))
        _, task, name = task_of(builder.plan, step, self.program.kind)
        self.reducing[step.out] = step.dead
        self.ready[step.out] = builder.task(Task(task, "reduce", seconds, after, module=name, key=str(step.bucket)))
        self._stall(self.ready[step.out])

    def _stall(self, transfer: int) -> None:
        """Where nothing runs beside a transfer, the next segment comes after it."""
        if not self.builder.rates.overlaps:
            self.waits.add(transfer)

    def _wait_reduce(self, step: WaitReduce) -> None:
        """Full gradients go when they are reduced, and this rank's rows of them come.

        Where nothing runs beside a collective, the wait is what reads them: they are there until then.
        """
        index = self.ready[step.pending]
        read = index if self.builder.rates.overlaps else max(index, self.last)
        self.waits.add(index)
        for register in step.outs:
            self._write(register, index, self.builder.tasks[index].module, "")
        self._die(self.reducing.pop(step.pending), read)

    def finish(self) -> None:
        """What the program returns lives on: saved for the backward, or gradients until the update."""
        last = len(self.builder.tasks) - 1
        names: dict[int, list[str]] = {}
        for register in self.program.outputs:
            if register is not None:
                names.setdefault(self._storage(register), []).append(self.contents[register].name)
        for storage, held in self.held.items():
            if storage < 0:
                self.builder.saved[_kept_name(-1 - storage)] = held
            elif storage not in names:
                self.builder.hold(held, last)
            elif self.program.kind == "forward":
                held.kind = "activation"
                self.builder.saved.update(dict.fromkeys(names[storage], held))
            else:
                held.kind = "gradient"
                self.builder.saved[f"gradient {held.name}"] = held


def _kept_name(bucket: int) -> str:
    return f"kept bucket {bucket}"
