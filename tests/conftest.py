"""Settings for all tests."""

from __future__ import annotations

import gc
import logging
import os
import sys
from pathlib import Path

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
settings.register_profile("zerograph", deadline=None)
settings.load_profile("zerograph")

COLLECT = (100_000, 20, 100)
"""When garbage is collected: by default a tenth of the suite's time goes into searching what compilers keep."""
gc.set_threshold(*COLLECT)


def pytest_collection_finish() -> None:
    """Leave what was imported out of collections, and of adoption's search for modules and optimizers."""
    gc.collect()
    gc.freeze()
