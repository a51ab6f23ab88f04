"""Settings for all tests."""

from __future__ import annotations

import sys
from pathlib import Path

# Worker processes inherit this path: it lets them `import ranks`, and import test modules by the names pytest gives.
TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
