"""The native core under many threads at once, without torch: also run under sanitizers (.ci/sanitize).

Optimizer steps, norms and transfers with injected faults go on beside each other while the pool is replaced and tickets
are dropped; with the argument `fork`, processes fork as well. Work is in flight when the interpreter
ends. Exits with 0 if every number is right.
"""

from __future__ import annotations

import array
import errno
import math
import os
import random
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress

import zerograph._core as _core
from zerograph._core import Algorithm, Direction, DType, FaultEffect, FaultPoint, IoEngine, Priority, Rule, Slab

COUNT = 200_000
ROUNDS = 12
MIB = 2**20
SGD = Rule(Algorithm.sgd, lr=1.0)


class Weights:
    """One parameter of zeros and its gradient of ones: each step takes one off."""

    def __init__(self) -> None:
        self.values, self.grads = (array.array("f", [value]) * COUNT for value in (0.0, 1.0))
        address, self._grad = self.values.buffer_info()[0], self.grads.buffer_info()[0]
        self._set = _core.TensorSet([(address, DType.float32, COUNT)], [], DType.float32, [], DType.float32, [])
        self.pieces = [(address, DType.float32, COUNT)]

    def start(self) -> _core.Ticket:
        return _core.update([(SGD, self._set, [self._grad], DType.float32, [])])


def steps(_: int) -> None:
    weights = Weights()
    for done in range(1, ROUNDS + 1):
        ticket = weights.start()
        if done % 3:
            assert not ticket.wait()
        del ticket  # waits where nobody has
        assert math.fsum(_core.squares(weights.pieces)) == COUNT * done**2
        assert weights.values == array.array("f", [-done]) * COUNT


def resize(_: int) -> None:
    for threads in (1, 3, 2, 4, 1, 2):
        _core.set_pool_threads(threads)


def transfers(engine: IoEngine, slab: Slab, file: int, number: int) -> None:
    pick, base = random.Random(number), number * MIB
    for _ in range(ROUNDS):
        size = pick.randrange(1, 500_000)
        sent, got = array.array("B", pick.randbytes(size)), array.array("B", bytes(size))
        place = base + pick.randrange(MIB - size)
        write = engine.submit(Direction.write, [(file, place, sent.buffer_info()[0], size, False)], Priority.later)
        read = engine.submit(Direction.read, [(file, place, got.buffer_info()[0], size, False)], Priority.now)
        engine.wait(read)
        engine.wait(write)
        assert got == sent


def fork(_: int) -> None:
    for _ in range(3):
        ticket = (weights := Weights()).start()
        child = os.fork()
        if child == 0:  # no clean-up of a copy whose other threads are gone
            code = 1
            with suppress(RuntimeError):
                ticket.wait()
                os._exit(2)
            if not weights.start().wait() and _core.pool_threads() > 0:
                code = 0
            _core.set_pool_threads(1)
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        ticket.wait()


def together(works: list[Callable[[int], None]]) -> None:
    failed: list[BaseException] = []

    def run(work: Callable[[int], None], number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(work, number)) for number, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def main(folder: str) -> list[object]:
    """What is still at work when the interpreter ends."""
    kept: list[object] = []
    for name in ["threads"] + ["uring"] * (_core.has_uring() and _core.probe_uring() == 0):
        engine, slab = IoEngine(name, depth=4, block=65536, buffer=65536, buffers=3), Slab(folder, 4 * MIB)
        file = engine.attach(slab.fd, slab.path, slab.memory_alignment, slab.offset_alignment)
        engine.inject(
            [(FaultPoint.write, n, 1, FaultEffect.cut, 100 * n) for n in range(3, 900, 7)]
            + [(FaultPoint.read, n, 1, FaultEffect.error, errno.EAGAIN) for n in range(5, 900, 11)]
        )
        together([lambda n, e=engine, s=slab, f=file: transfers(e, s, f, n)] * 4 + [steps, steps, resize])
        kept.append((engine, slab))
    if "fork" in sys.argv[1:]:
        fork(0)
    waited, left = Weights(), Weights()  # one each: steps of the same parameter are the caller's to put in order
    threading.Thread(target=waited.start().wait, daemon=True).start()
    return [*kept, left.start(), left, waited]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        kept = main(temporary)
