"""Plan files of imaginary models for tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from zerograph.core.files.planfile import Holding, PassRecord, PlanFile, Reason
from zerograph.core.files.runfile import Beside, Measured, Run, move_key
from zerograph.core.instructions import (
    Compute,
    Free,
    Gather,
    HostUpdate,
    Instruction,
    Move,
    Reduce,
    Update,
    WaitGather,
    WaitReduce,
)
from zerograph.core.layout import Layout
from zerograph.core.machine import Machine, machine_named
from zerograph.core.plan import Bucket, Plan
from zerograph.core.program import Program, Register, Segment
from zerograph.core.step import Kind, Param
from zerograph.core.timeline import Forecast, Span, Stream
from zerograph.planner.explain.retime import tasks_of
from zerograph.sim.forecast import forecast
from zerograph.sim.rates import Rates
from zerograph.sim.simulate import simulate
from zerograph.sim.tasks import Tasks

MIB = 2**20


class Task:
    """What a span says but for when, and seconds."""

    def __init__(self, name: str, stream: Stream, seconds: float, after: tuple[int, ...] = (), **about: Any) -> None:
        self.seconds = seconds
        self.span = Span(-1, name, stream, 0.0, 0.0, after=after, **about)


def play(tasks: Sequence[Task], holdings: Sequence[Holding] = (), not_counted: tuple[str, ...] = ()) -> Forecast:
    """The forecast of ``tasks``, which hold that memory: each starts when its stream is free and all that it waits for
    has ended."""
    run, spans = Tasks(), []
    for index, task in enumerate(tasks):
        start = max((run.free.get(task.span.stream, 0.0), *(run.ends[before] for before in task.span.after)))
        run.starts.append(start)
        run.ends.append(start + task.seconds)
        run.free[task.span.stream] = run.ends[-1]
        spans.append(replace(task.span, task=index, start=start, end=run.ends[-1]))
    return forecast(tuple(spans), run, holdings, not_counted)


def run_of(file: PlanFile, times: float = 2.0) -> Run:
    """A run of ``file`` that took ``times`` as long, in the segments of another process and hence of other digests."""
    spans, segments, moves = [], {}, {}
    collectives: dict[str, dict[int, float]] = {"gather": {}, "reduce": {}}
    for span in file.forecast.spans:
        seconds, key = times * (span.end - span.start), span.key
        if span.stream in collectives:
            collectives[span.stream][span.bucket] = seconds
        elif span.what:
            moves[move_key(span.operation, span.what, span.bucket, span.label)] = seconds
        elif span.key:
            segments[key := f"run's {span.key}"] = seconds
        begin, end = times * span.start, times * span.end
        cuts = (begin, (begin + end) / 2, end) if span.stream in collectives else (begin, end)  # the start and the wait
        for start, stop in pairwise(cuts):
            spans.append(replace(span, task=len(spans), start=start, end=stop, key=key, after=()))
    update = next(
        (times * (s.end - s.start) for s in file.forecast.spans if s.operation == "update" and s.stream == "compute"),
        None,
    )
    measured = Measured(segments, collectives["gather"], collectives["reduce"], update, moves)
    peaks = {t: replace(peak, task=0) for t, peak in file.forecast.peaks.items()}
    run = Forecast(tuple(spans), slower(file.forecast, times).memory, peaks)
    return Run(file.plan.digest, file.machine.device, run, measured)


def slower(forecast: Forecast, times: float) -> Forecast:
    """``forecast`` where everything takes ``times`` as long."""
    spans = tuple(replace(span, start=times * span.start, end=times * span.end) for span in forecast.spans)
    memory = {t: tuple((times * at, size) for at, size in curve) for t, curve in forecast.memory.items()}
    return replace(forecast, spans=spans, memory=memory)


def beside(file: PlanFile, times: float = 2.0) -> Beside:
    """That run, ready to be laid beside ``file``."""
    run = run_of(file, times)
    return Beside(run, slower(file.forecast, times), tasks_of(file, run))


def plan_file(layers: int = 4, world_size: int = 2, offload: bool = False, update: bool = False) -> PlanFile:
    """A stage-3 step of a model of ``layers`` blocks: gathers ahead, computes, reduces, updates.

    With ``offload`` shards come from host memory and updates go there, so that all tiers and more streams occur.
    With ``update`` the step ends with the optimizer's, as every real one does.
    """
    tasks: list[Task] = []
    about: dict[str, Any]
    fetched: list[Holding] = []  # which the file does not tell of
    holdings = [Holding("shards", "param", "device", layers * 24 * MIB // world_size, -1, -1)]
    visits = [("forward", i) for i in range(layers)] + [("backward", i) for i in reversed(range(layers))]
    computed: list[int] = []
    kept: dict[int, int] = {}
    for phase, i in visits:
        module, source = f"blocks.{i}", f"model.py:{40 + i % 3}"
        fetch: tuple[int, ...] = ()
        if offload:
            fetch = (len(tasks),)
            about = {"module": module, "phase": phase, "bucket": i, "label": module, "what": "shard"}
            tasks.append(Task(f"fetch shard of {module}", "h2d", 0.004, operation="fetch", **about))
        gather = len(tasks)
        earlier = computed[-2:-1]  # at most two buckets whole
        twice = phase == "backward" and i == layers - 1  # while it is whole: as if it were another tile
        about = {"module": module, "phase": phase, "bucket": i, "label": module, "tile": int(twice)}
        tasks.append(Task(f"gather {module}", "gather", 0.003, (*fetch, *earlier), operation="gather", **about))
        here = len(tasks)
        fetched += [Holding(f"{module}.shard", "param", "device", 12 * MIB, first, here) for first in fetch]
        if phase == "backward":
            holdings.append(Holding(f"{module}.saved", "activation", "device", 6 * MIB, kept[i], here, module, source))
        else:
            kept[i] = here
        work = 0.005 if phase == "forward" else 0.010
        about = {"module": module, "source": source, "key": f"digest of {phase}", "flops": 10**9, "phase": phase}
        tasks.append(Task(f"{phase} {module}", "compute", work, (gather,), **about))
        holdings.append(Holding(f"{module}.weight", "gathered", "device", 24 * MIB, gather, here, module, source))
        computed.append(here)
        if phase == "backward":
            about = {"phase": phase, "bucket": i, "label": module, "module": module}
            tasks.append(Task(f"reduce {module}", "reduce", 0.004, (here,), source=source, operation="reduce", **about))
            if offload:
                name, after = f"spill gradient of {module}", (len(tasks) - 1,)
                tasks.append(Task(name, "d2h", 0.004, after, operation="spill", what="gradient", **about))
                name, after = f"update {module}", (len(tasks) - 1,)
                about["phase"] = "update"
                tasks.append(Task(name, "cpu_update", 0.006, after, operation="update", what="states", **about))
    reduced = tuple(i for i, task in enumerate(tasks) if task.span.stream == "reduce")
    if update:
        about = {"module": "optimizer", "operation": "update", "phase": "update"}
        tasks.append(Task("optimizer update", "compute", 0.002, reduced, **about))
    if offload:
        holdings.append(Holding("optimizer states", "state", "host", layers * 96 * MIB // world_size, -1, -1))
    buckets = tuple(
        Bucket(
            i,
            f"blocks.{i}",
            (
                Param(
                    f"blocks.{i}.weight",
                    (2048, 3072),
                    "float32",
                    "float32",
                    "float32",
                    True,
                    Layout("rows", world_size),
                ),
            ),
            "use",
        )
        for i in range(layers)
    )
    return PlanFile(
        model="model.py:make",
        plan=Plan(3, world_size, buckets, 1),
        machine=machine_named("cpu"),
        budget={"device": 8 * 2**30, "host": 16 * 2**30},
        forecast=play(tasks, [*holdings, *fetched], ("allocator fragmentation",)),
        holdings=tuple(holdings),
        reasons=(
            Reason("plan", "stage 3", "the user asked for it"),
            *(Reason(b.name, b.residency, "stage 3 frees parameters after each use") for b in buckets),
        ),
        passes=(
            PassRecord("joint", "canonicalize", 3, "-a\n+b\n"),
            PassRecord("forward", "gather", layers, "--- before\n+++ after\n@@ -1 +1 @@\n-unshard\n+gather\n"),
            PassRecord("forward", "prefetch", 0),
        ),
        tokens=512,
        flops=10**9 * layers,
    )


def programmed(layers: int = 4, offload: bool = False, machine: Machine | None = None) -> PlanFile:
    """A plan file of the same model with the programs of its step, whose forecast on ``machine`` it has.

    Each block is gathered before the one in front of it computes. With ``offload`` shards come from host memory and
    updates go there.
    """
    file, contents = plan_file(layers), list[Register]()

    def register(name: str, kind: Kind, size: int, tier: Any = "device") -> int:
        contents.append(Register(name, size * MIB, len(contents), kind, tier))
        return len(contents) - 1

    bodies: dict[str, list[Instruction]] = {"forward": [], "backward": [], "update": []}
    visits = [("forward", i) for i in range(layers)] + [("backward", i) for i in reversed(range(layers))]
    gathers = list[tuple[list[Instruction], int]]()
    for _, i in visits:
        name, begin = f"blocks.{i}", list[Instruction]()
        shard = (register(f"{name}.shard", "param", 12),) if offload else ()
        if offload:
            begin.append(Move("host", "device", "shard", name, name, 12 * MIB, (), shard, bucket=i))
        whole = register(f"{name}.weight", "gathered", 24)
        begin.append(Gather(i, file.plan.buckets[i].params, shard, whole, dead=shard, bytes=24 * MIB))
        gathers.append((begin, whole))
    saved = dict[int, int]()
    for place, (phase, i) in enumerate(visits):
        name, body, (begin, whole) = f"blocks.{i}", bodies[phase], gathers[place]
        about: dict[str, Any] = {"module": name, "source": f"model.py:{40 + i % 3}"}
        body += begin if place in (0, layers) else ()
        if place + 1 not in (layers, len(visits)):
            body += gathers[place + 1][0]
        body.append(WaitGather(whole, bucket=i))
        if phase == "forward":
            saved[i] = register(f"{name}.saved", "activation", 6)
            body += [Compute(0, (whole,), (saved[i],), **about), Free(i, (whole,), dead=(whole,))]
            continue
        full, reduced = register(f"{name}.full", "gradient", 24), register(f"{name}.gradient", "gradient", 12)
        body += [
            Compute(1, (whole, saved[i]), (full,), dead=(saved[i],), **about),
            Free(i, (whole,), dead=(whole,)),
            Reduce(i, file.plan.buckets[i].params, (full,), reduced, dead=(full,), bytes=24 * MIB),
            WaitReduce(reduced, bucket=i),
        ]
        if offload:
            there = register(f"{name}.gradient", "gradient", 12, "host")
            to_host = ("device", "host", "gradient", name, name, 12 * MIB, (reduced,), (there,), (reduced,))
            body.append(Move(*to_host, bucket=i))
            bodies["update"].append(HostUpdate(name, name, 96 * MIB, (there,), (), (there,), bucket=i, updated=1))
    bodies["update"].append(Update(tuple(range(layers)), (96 * MIB,) * layers))
    segments = [Segment(f"digest of {kind}", 1, flops=10**9) for kind in ("forward", "backward")]
    programs = tuple(
        Program(
            kind,
            0,
            len(contents),
            body,
            (),
            segments,
            contents,
            [bucket.name for bucket in file.plan.buckets],
            carries=kind != "forward",
        )
        for kind, body in bodies.items()
    )
    held = (Holding("shards", "param", "device", layers * 12 * MIB, -1, -1),)
    file = replace(file, machine=machine or file.machine)
    found, holdings = simulate(programs, Rates.of(file.machine, file.plan), held=held)
    return replace(file, forecast=found, holdings=holdings, programs=programs)
