"""What other processes take of the machine while it is measured."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from zerograph.measure.host import Others


def test_a_process_that_is_not_ours_is_seen_and_a_child_that_ended_is_ours() -> None:
    others = Others()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        time.sleep(1.5)
        running = others.share
        busy.kill()
    assert running > 0.5 / (os.cpu_count() or 1)
    assert others.share < running
