"""Settings for all tests."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Worker processes inherit this path: it lets them `import ranks`, and import test modules by the names pytest gives.
TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

# Inductor believes what the kernel says of the processor; trying each instruction set costs half a minute once.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Tests change passes and planners and look at what they do: no frame of another test may be loaded in its place.
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"

# pytest's handlers would have torch write, for its structured trace, each graph that it makes.
_trace = logging.getLogger("torch.__trace")
_trace.addHandler = lambda handler: None  # type: ignore[method-assign]

# No test says how long an example takes: that depends on what else the machine does.
settings.register_profile("quick", deadline=None, max_examples=8)
settings.register_profile("full", deadline=None, max_examples=100)  # --hypothesis-profile=full
settings.load_profile("quick")

COLLECT = (100_000, 20, 100)
"""When garbage is collected: by default a tenth of the suite's time goes into searching what compilers keep."""
gc.set_threshold(*COLLECT)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--device=fake`` runs tests of accelerators on one that needs no hardware."""
    parser.addoption("--device", choices=["fake"], help="the accelerator of tests/gpu that this machine is to have")


def pytest_configure(config: pytest.Config) -> None:
    """Let this process have the accelerator, and those that it starts."""
    if config.getoption("--device") == "fake":
        from fake_device import device

        device.load()


COSTLY = ("numerics", "integrations")
"""Rooms in which a case takes seconds: it trains models, mostly on several processes."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test whose cases are costly the first is quick, and the others are slow."""
    seen = set[str]()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test in seen and (item.get_closest_marker("costly") or not {*item.path.parts}.isdisjoint(COSTLY)):
            item.add_marker(pytest.mark.slow)
        seen.add(test)


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count what is left out, by room."""
    for item in items:
        rooms = item.config.stash.setdefault(LEFT_OUT, Counter())
        rooms[item.path.relative_to(TESTS).parts[0]] += 1


LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells what it left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = dict(session.config.stash.get(LEFT_OUT, Counter()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """All workers collect the same."""
    node.config.stash[LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out."""
    rooms = config.stash.get(LEFT_OUT, Counter())
    if rooms:
        counts = ", ".join(f"{count} of {room}" for room, count in rooms.most_common())
        terminalreporter.write_line(f"left out: {rooms.total()} cases ({counts}); make test-full runs them")


def without_timed_guards() -> None:
    """Let Dynamo, where it is imported, leave out what a thirtieth of a rank's time goes into: it times the guards of
    each frame, behind a flush of the processor's caches, for its log."""
    if guards := sys.modules.get("torch._dynamo.guards"):
        vars(guards)["profile_guard_manager"] = lambda *_: 0.0


def pytest_collection_finish() -> None:
    """Leave what was imported out of collections, and of adoption's search for modules and optimizers."""
    without_timed_guards()
    gc.collect()
    gc.freeze()
