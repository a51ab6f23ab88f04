"""Snapshots of memory as files that pytorch.org/memory_viz and ``python -m torch.cuda._memory_viz`` read."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROTOCOL = 4
"""The newest pickle protocol that the visualizer's own reader knows."""


def write_snapshot(snapshot: Mapping[str, Any], path: Path) -> None:
    """Write ``snapshot``, which has the schema of ``torch.cuda.memory._snapshot()``.

    Raises:
        OSError: ``path`` cannot be written.
    """
    path.write_bytes(pickle.dumps(snapshot, protocol=PROTOCOL))
