"""The ranks of a measurement: processes that start, measure in step, and answer. No torch in here."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from zerograph.core.errors import RankError, ZeroGraphError
from zerograph.core.units import counted
from zerograph.measure.job import Job, RankReport

LIMIT = 180.0
"""Seconds until ranks that say nothing are given up."""
_HINT = "zerograph doctor says what does not work here; ZEROGRAPH_DEBUG=1 shows tracebacks"


def run_ranks(job: Job, tell: Callable[[str], None]) -> list[RankReport]:
    """The reports of all ranks, in order; ``tell`` is called with what rank 0 measures.

    Raises:
        RankError: a rank failed, ended, or said nothing for :data:`LIMIT` seconds.
    """
    tell(f"starting {counted(job.world_size, 'rank')}")
    # Not forked: OpenMP and CUDA do not survive a fork.
    context = get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="zerograph-bench-") as folder, _environment(job.threads):
        try:
            for rank in range(job.world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=serve, args=(job, rank, str(Path(folder, "store")), theirs))
                process.daemon = True
                process.start()
                # Else this process holds the other end too, and never hears that the rank has ended.
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            reports = _gather_reports(pipes, tell)
            _end(processes, patience=10.0)
            return reports
        finally:
            _end(processes, patience=0.0)  # after a failure the others may wait for the rank that is gone


def serve(job: Job, rank: int, store: str, pipe: Connection) -> None:
    """The body of a rank's process: says what it does, then reports, or says why it cannot."""
    try:
        # By name: the parent never imports it, and with it torch.
        work = importlib.import_module("zerograph.measure.rank").work
        pipe.send(work(job, rank, store, lambda text: pipe.send(text) if rank == 0 else None))
    except Exception as error:
        ours = isinstance(error, ZeroGraphError)
        pipe.send(error if ours else RankError(f"rank {rank} failed: {type(error).__name__}: {error}", _HINT))
        if os.environ.get("ZEROGRAPH_DEBUG") == "1":
            raise
        sys.exit(1)


def _gather_reports(pipes: list[Connection], tell: Callable[[str], None]) -> list[RankReport]:
    reports: dict[int, RankReport] = {}
    deadline = time.monotonic() + LIMIT
    while len(reports) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in reports}
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} said nothing for {LIMIT:.0f} s", _HINT)
        deadline = time.monotonic() + LIMIT
        for pipe in ready:
            assert isinstance(pipe, Connection)
            message = _received(pipe, waiting[pipe])
            if isinstance(message, str):
                tell(message)
            else:
                reports[waiting[pipe]] = message
    return [reports[rank] for rank in range(len(pipes))]


def _received(pipe: Connection, rank: int) -> str | RankReport:
    try:
        message = pipe.recv()
    except EOFError:
        raise RankError(f"rank {rank} ended while it measured", _HINT) from None
    if isinstance(message, Exception):
        raise message
    assert isinstance(message, str | RankReport)
    return message


def _end(processes: list[BaseProcess], patience: float) -> None:
    for process in processes:
        process.join(patience)
        if process.is_alive():
            process.kill()
            process.join()


@contextmanager
def _environment(threads: int) -> Iterator[None]:
    """Threads of the ranks: OpenMP reads them when torch is loaded, so they must be set before a process starts."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(threads)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
