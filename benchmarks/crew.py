"""The processes of one variant, and how the benchmarks talk to them.

Each variant has processes of its own, so that compiled state, allocator and threads do not mix, and a variant that
crashes or hangs takes nothing else with it. A crew waits in `recv`, using no CPU, while another one is measured.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import Workload, batches, build_model, called
from namespaces import INTERFACE, Host
from torch.distributed.tensor import DTensor
from variants import Trainer, group_parameters, missing, parse, part_by_part

LOG_TAIL = 4000  # characters of a failed process's output that are shown
BARE = "bare"  # the spec of a crew without a model


class CrewFailed(Exception):
    """A process of a crew raised, died, or did not answer in time; `str` is one line, `.detail` all that is known."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason)
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Job:
    """What one process is told when it starts."""

    spec: str
    work: Workload
    rank: int
    world: int
    log: str
    host: Host | None = None


class Clock:
    """Marks in time: the host's clock, or events on the current CUDA stream, which cost no synchronization."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.device == "cpu":
            self.marks.append(time.perf_counter())
        else:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)

    def laps(self) -> list[float]:
        """Seconds between one mark and the next."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if self.device == "cpu":
            return [after - before for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


@dataclass(slots=True)
class Worker:
    """One rank. Its public methods are the commands a crew can be given."""

    job: Job
    trainer: Trainer = field(init=False)
    data: list[tuple[torch.Tensor, torch.Tensor]] = field(init=False)
    done: int = 0

    def build(self) -> None:
        variant, options = parse(self.job.spec)
        parts = options.pop("loop", 1)
        self.trainer = variant.build(build_model(self.job.work), self.job.work, options)
        self.trainer.forward = called(self.job.work, self.trainer.forward)
        self.trainer.forward = part_by_part(self.trainer.forward, parts)
        self.data = batches(self.job.work, self.job.rank)

    def imports(self) -> None:
        """Imports what every compiling variant imports on its first call, so that it counts for none."""
        import torch._dynamo
        import torch._inductor.compile_fx  # noqa: F401

    def check(self, count: int) -> list[tuple[float, float]]:
        """Loss and gradient norm of each of `count` steps."""
        found = []
        for tokens, targets in self.next_batches(count):
            loss = self.trainer.forward(tokens, targets)
            self.trainer.backward(loss)
            found.append((float(loss.detach()), self.trainer.gradient_norm()))
            self.trainer.update()
        return found

    def steps(self, count: int, warm: int = 1) -> dict[str, Any]:
        """Seconds of (forward, backward, update) of `count` steps after `warm` untimed ones, and CPU seconds of all."""
        processor = processor_seconds()
        for batch in self.next_batches(warm):
            self.step(batch, Clock(self.job.work.device))
        clock = Clock(self.job.work.device)
        clock.mark()
        for batch in self.next_batches(count):
            self.step(batch, clock)
        laps = clock.laps()
        phases = [tuple(laps[i : i + 3]) for i in range(0, len(laps), 3)]
        return {"phases": phases, "cpu": processor_seconds() - processor, "steps": count + warm}

    def step(self, batch: tuple[torch.Tensor, torch.Tensor], clock: Clock) -> None:
        loss = self.trainer.forward(*batch)
        clock.mark()
        self.trainer.backward(loss)
        clock.mark()
        self.trainer.update()
        clock.mark()

    def next_batches(self, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(count):
            yield self.data[self.done % len(self.data)]
            self.done += 1

    def collectives(self, size: int, piece: int) -> dict[str, float]:
        """Seconds of each collective over `size` bytes of fp32 in pieces of at most `piece` bytes."""
        world, device = self.job.world, self.job.work.device
        count = -(-size // piece)
        full = torch.ones(size // count // 4 // world * world, device=device)
        shard = torch.ones(full.numel() // world, device=device)
        kinds = {
            "all-gather": lambda: dist.all_gather_into_tensor(full, shard),
            "reduce-scatter": lambda: dist.reduce_scatter_tensor(shard, full),
            "all-reduce": lambda: dist.all_reduce(full),
        }
        return {name: self.repeated(call, count) for name, call in kinds.items()}

    def repeated(self, call: Any, count: int) -> float:
        dist.barrier()
        clock = Clock(self.job.work.device)
        clock.mark()
        for _ in range(count):
            call()
        clock.mark()
        return sum(clock.laps())

    def buckets(self) -> list[int]:
        """Gathered bytes of each of zerograph's buckets."""
        backend = self.trainer.backend
        return [bucket.bytes for bucket in backend.report().buckets] if backend is not None else []

    def recorded(self, machine: str) -> dict[str, float]:
        """A recorded step of zerograph: its peak, and what forecasts of it say by the rates of `machine`."""
        from zerograph.core.machine import machine_from

        backend, found = self.trainer.backend, machine_from(machine)
        with backend.record() as run:
            self.step(*self.next_batches(1), Clock(self.job.work.device))
        predicted = run.predicted(found)
        return {
            "peak": run.forecast.peaks["device"].bytes,
            "forecast_peak": predicted.forecast.peaks["device"].bytes,
            "nvme": sum(backend.report().on_nvme.values()),
            "forecast_nvme": predicted.forecast.peaks["nvme"].bytes if "nvme" in predicted.forecast.peaks else 0,
            "forecast_growth": predicted.resident.bytes if predicted.resident is not None else 0,
            "forecast": run.by_rates(found).forecast.seconds,
            "retimed": predicted.forecast.seconds,
        }

    def allocated(self) -> dict[str, int]:
        """Bytes that torch's allocator had handed out on the CPU at the peak of one more step, parameters and optimizer
        states included, and what these two are."""
        backend, stays = self.trainer.backend, resting(self.trainer.optimizer)
        batch, clock = next(self.next_batches(1)), Clock(self.job.work.device)
        if backend is not None and self.job.world > 1:  # it holds buffers that torch's profiler would not see begin
            with backend.record() as run:
                self.step(batch, clock)
            return {"peak": run.forecast.peaks["device"].bytes, "stays": stays}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run:
            self.step(batch, clock)
        level = most = stays
        for event in run.profiler.kineto_results.events():
            if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
                level += event.nbytes()
                most = max(most, level)
        return {"peak": most, "stays": stays}

    def report(self) -> str:
        """zerograph's own account of what it did, or nothing."""
        backend = self.trainer.backend
        return str(backend.report()) if backend is not None else ""

    def memory(self) -> dict[str, int]:
        """Bytes resident now and at most since the start or the last reset; on CUDA those of the allocator."""
        if self.job.work.device == "cuda":
            return {"rss": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}
        lines = Path("/proc/self/status").read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Vm")}
        return {"rss": found["VmRSS"], "peak": found["VmHWM"]}

    def reset_peak(self) -> bool:
        """Forgets the peak so far; False where the kernel does not permit it."""
        if self.job.work.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return True
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True


@dataclass(slots=True)
class Crew:
    """`world` processes that run the variant `spec`. A context manager: leaving it ends them."""

    spec: str
    work: Workload
    world: int
    cache: Path | None = None  # Inductor's cache, if not the usual one
    hosts: Sequence[Host] = ()  # by rank, where they are several
    logs: Path = field(init=False)
    processes: list[Any] = field(init=False, default_factory=list)
    pipes: list[connection.Connection] = field(init=False, default_factory=list)

    def __enter__(self) -> Crew:
        self.logs = Path(tempfile.mkdtemp(prefix="zerograph-bench-"))
        port = free_port()
        for rank in range(self.world):
            self.start(rank, port)
        return self

    def __exit__(self, *exc: object) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
        self.kill()
        shutil.rmtree(self.logs, ignore_errors=True)

    def start(self, rank: int, port: int) -> None:
        """The environment is torchrun's; it is set around the start because OpenMP reads it when torch is loaded."""
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        host = self.hosts[rank] if self.hosts else None
        job = Job(self.spec, self.work, rank, self.world, str(self.logs / f"{rank}.log"), host)
        local = [r for r in range(self.world) if not self.hosts or self.hosts[r] == host]
        variables = {
            "RANK": rank, "LOCAL_RANK": local.index(rank), "WORLD_SIZE": self.world, "LOCAL_WORLD_SIZE": len(local),
            "MASTER_ADDR": self.hosts[0].address if self.hosts else "127.0.0.1", "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1,
        }  # fmt: skip
        if host is not None:
            variables["GLOO_SOCKET_IFNAME"] = INTERFACE
        if self.cache is not None:
            variables["TORCHINDUCTOR_CACHE_DIR"] = self.cache
        if self.work.device == "cpu":
            variables["DS_ACCELERATOR"] = "cpu"
        process = context.Process(target=serve, args=(theirs, job))
        with environment({key: str(value) for key, value in variables.items()}):
            process.start()
        theirs.close()
        self.processes.append(process)
        self.pipes.append(ours)

    def call(self, command: str, *args: Any, timeout: float = 600) -> list[Any]:
        """Runs a `Worker` method on all ranks and gives their answers in order. Raises CrewFailed and ends the crew."""
        try:
            for pipe in self.pipes:
                pipe.send((command, args))
            return self.replies(command, timeout)
        except (CrewFailed, OSError) as error:
            self.kill()
            raise error if isinstance(error, CrewFailed) else CrewFailed(f"{command}: {error}", self.output()) from None

    def replies(self, command: str, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        replies: dict[int, Any] = {}
        while len(replies) < self.world:
            waiting = [rank for rank in range(self.world) if rank not in replies]
            ready = connection.wait([self.pipes[rank] for rank in waiting], max(0, deadline - time.monotonic()))
            if not ready:
                raise CrewFailed(f"{command}: no answer in {timeout:.0f} s", self.output())
            replies |= {rank: self.reply(rank, command) for rank in waiting if self.pipes[rank] in ready}
        return [replies[rank] for rank in range(self.world)]

    def reply(self, rank: int, command: str) -> Any:
        try:
            status, value = self.pipes[rank].recv()
        except (EOFError, OSError):
            self.processes[rank].join(5)
            code = self.processes[rank].exitcode
            raise CrewFailed(f"{command}: rank {rank} died with exit code {code}", self.output()) from None
        if status == "failed":
            raise CrewFailed(f"{command}: {last_error(value)}", f"rank {rank}:\n{value}\n{self.output()}")
        return value

    def output(self) -> str:
        """The end of what each rank printed."""
        logs = sorted(self.logs.glob("*.log"))
        return "\n".join(f"output of rank {log.stem}:\n{log.read_text(errors='replace')[-LOG_TAIL:]}" for log in logs)

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()


def serve(pipe: connection.Connection, job: Job) -> None:
    """The body of one rank's process: obeys commands until told None or until the parent is gone."""
    redirect_output(job.log)
    if job.host is not None:
        job.host.enter()
    worker = Worker(job)
    try:
        join_group(job)
        while (message := pipe.recv()) is not None:
            command, args = message
            pipe.send(("done", getattr(worker, command)(*args)))
    except EOFError:
        pass
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        os._exit(1)  # another rank may be in a collective that waits for this one: no orderly shutdown
    if dist.is_initialized():
        dist.destroy_process_group()


def join_group(job: Job) -> None:
    torch.set_num_threads(1)
    if job.work.device == "cuda":
        torch.cuda.set_device(job.rank)
    if job.world > 1 or job.spec == BARE or parse(job.spec)[0].group:
        dist.init_process_group("nccl" if job.work.device == "cuda" else "gloo")


def resting(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of this rank's parameters and optimizer states."""
    parameters = group_parameters(optimizer)
    states = [value for p in parameters for value in optimizer.state[p].values() if isinstance(value, torch.Tensor)]
    full = (value.to_local() if isinstance(value, DTensor) else value for value in (*parameters, *states))
    # By storage: shards of a bucket may be views of one buffer.
    return sum({s.data_ptr(): s.nbytes() for s in (value.detach().untyped_storage() for value in full)}.values())


def processor_seconds() -> float:
    """CPU time of this process and of what it ran and waited for, a C++ compiler above all."""
    return sum(os.times()[:4])


def redirect_output(path: str) -> None:
    """Sends what Python and C++ print to a file: it is shown only if the process fails."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@dataclass(frozen=True, slots=True)
class Beside:
    """Two crews that took steps in turns.

    Attributes:
        rest, peaks: by name, bytes resident between steps, and at most over steps after the first ones.
        wall, cpu: by round, the second's seconds to the first's, by the clock and of the processor.
    """

    rest: dict[str, int]
    peaks: dict[str, int]
    wall: list[float]
    cpu: list[float]


def beside(crews: dict[str, Crew], rounds: int, timeout: float) -> Beside:
    """Run two crews of one process each, by name, in turns."""
    rest = {}
    for name, crew in crews.items():
        crew.call("imports", timeout=timeout)
        crew.call("build", timeout=timeout)
        crew.call("steps", 2, 0, timeout=timeout)
        crew.call("reset_peak")
        rest[name] = crew.call("memory")[0]["peak"]
    wall, cpu = [], []
    for number in range(rounds):
        order = list(crews) if number % 2 else list(crews)[::-1]
        results = {name: crews[name].call("steps", 1, 0, timeout=timeout)[0] for name in order}
        first, second = (results[name] for name in crews)
        wall.append(sum(second["phases"][0]) / sum(first["phases"][0]))
        cpu.append(second["cpu"] / first["cpu"])
    return Beside(rest, {name: crew.call("memory")[0]["peak"] for name, crew in crews.items()}, wall, cpu)


def last_error(trace: str) -> str:
    """The line of a traceback that names the exception."""
    lines = [line for line in trace.splitlines() if line and not line.startswith((" ", "\t"))]
    named = [line for line in lines if ":" in line and line.split(":")[0].replace(".", "").replace("_", "").isalnum()]
    return (named or lines or ["unknown error"])[-1][:200]


def runnable(specs: list[str]) -> tuple[list[str], dict[str, str]]:
    """The variants that can run here, and why the others cannot."""
    reasons = {spec: missing(spec) for spec in specs}
    return [s for s in specs if reasons[s] is None], {s: r for s, r in reasons.items() if r is not None}
