"""Real processes for tests: ``run(2, function, *args)`` calls ``function`` on two gloo ranks and returns both results.

Workers live for many calls; a failed or hung call ends its group, and the next call starts a fresh one. All are forked
from one server that imported torch and zerograph, which takes longer than most tests do.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import logging
import multiprocessing as mp
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import pytest

from zerograph.core.errors import ZeroGraphError

TIMEOUT = 180.0
"""Seconds a call may take before its group is killed and the test fails."""


RENEWED_AFTER = 60
"""Calls after which new processes take over: compilers keep what they made, and searching it makes tests slow."""

PRELOADED = [
    "torch", "zerograph.compiler.driver", "zerograph.api", "zerograph.optim", "torch.distributed.checkpoint.state_dict",
    "safetensors.torch", "torch._dynamo.backends.inductor", "torch._inductor.fx_passes.fuse_attention", "pytest",
    "hypothesis", "warmed",
]  # fmt: skip
"""What the server of ranks imports: else each of them would, and compile its first model three times as long."""


class RankFailure(AssertionError):
    """One or more ranks raised; the message holds their tracebacks, ``ranks`` maps rank to traceback."""

    def __init__(self, ranks: dict[int, str]) -> None:
        self.ranks = ranks
        super().__init__("\n".join(f"--- rank {r} ---\n{text}" for r, text in ranks.items()))


def run(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, fresh: bool = False
) -> list[Any]:
    """Results of ``function(*args)`` on every rank, by rank.

    ``function`` must be importable (a module-level function) and its arguments and results picklable. ``fresh`` starts
    new processes, for what depends on their history, such as resident memory.
    """
    group = _GROUPS.get(world_size)
    if group is not None and (fresh or group.calls >= RENEWED_AFTER):
        group.close()
    if group is None or not group.alive:
        group = _GROUPS[world_size] = _Group(world_size)
    return group.call(function, args, timeout)


def refused(function: Callable[..., Any], *args: Any) -> str:
    """For a rank to return: kind and text of our error that ``function(*args)`` raises.

    An error that leaves a rank ends the processes of its group, and the next test would compile its models again.
    """
    with pytest.raises(ZeroGraphError) as caught:
        function(*args)
    return f"{type(caught.value).__name__}: {caught.value}"


@contextmanager
def warned() -> Iterator[list[str]]:
    """Inside, the list gets what this process logs under ``zerograph``, warnings and worse."""
    handler, messages = logging.Handler(logging.WARNING), list[str]()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerograph").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("zerograph").removeHandler(handler)


class _Group:
    def __init__(self, world_size: int) -> None:
        context = server()
        self.alive, self.calls = True, 0
        handle, store = tempfile.mkstemp(prefix="zerograph-test-store-")
        os.close(handle)
        self.store = store
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(rank, world_size, store, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        self.calls += 1
        for pipe in self.pipes:
            pipe.send((function, args))
        results, failures = [], {}
        for rank, pipe in enumerate(self.pipes):
            # Once a rank failed, the others may wait for it in a collective: give them a moment only.
            if not pipe.poll(timeout if not failures else 10.0):
                failures[rank] = f"no answer within {timeout:.0f} s\n{self._where(rank)}"
                continue
            try:
                ok, value = pipe.recv()
            except EOFError:
                self.processes[rank].join(1.0)
                value = f"the process ended with exit code {self.processes[rank].exitcode}\n{_crash(self.store, rank)}"
                ok = False
            if ok:
                results.append(value)
            else:
                failures[rank] = value
        if failures:
            self.close()
            raise RankFailure(failures)
        return results

    def _where(self, rank: int) -> str:
        """Where each thread of a rank is that does not answer."""
        process = self.processes[rank]
        if process.is_alive() and process.pid:
            os.kill(process.pid, signal.SIGUSR1)
            process.join(1.0)  # time to write; it goes on after that
        return _crash(self.store, rank)

    def close(self) -> None:
        self.alive = False
        for process in self.processes:
            process.kill()
        for rank, process in enumerate(self.processes):
            process.join()
            Path(f"{self.store}.{rank}.crash").unlink(missing_ok=True)


def server() -> mp.context.ForkServerContext:
    """Where ranks are forked from. OpenMP reads its number of threads when torch is imported, and Inductor asks whether
    there is a GPU: answered by CUDA and not by NVML, no process forked from here could use one."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(Path(__file__).parent), *paths])))
        ensure_running()
    return context


def _crash(store: str, rank: int) -> str:
    """What a rank wrote that was stopped by a signal: where each of its threads was."""
    path = Path(f"{store}.{rank}.crash")
    return path.read_text() if path.exists() else ""


def _worker(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    crash = os.open(f"{store}.{rank}.crash", os.O_CREAT | os.O_WRONLY)
    faulthandler.enable(crash)
    faulthandler.register(signal.SIGUSR1, crash)
    import torch
    import torch.distributed as dist
    from conftest import COLLECT, without_timed_guards
    from fake_device import device

    torch.set_num_threads(1)
    gc.set_threshold(*COLLECT)
    without_timed_guards()
    backend = "gloo"
    if os.environ.get(device.LIBRARY):  # the tests were told to have it
        device.load()
        backend = device.GROUP
    dist.init_process_group(backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    while True:
        # What compilers keep piles up, and is searched by collections and by adoption: half of the time in the end.
        gc.collect()
        gc.freeze()
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            result = (True, function(*args))
        except BaseException:
            result = (False, traceback.format_exc())
        torch._dynamo.reset()
        pipe.send(result)


_GROUPS: dict[int, _Group] = {}


@atexit.register
def _close_all() -> None:
    for group in _GROUPS.values():
        group.close()
