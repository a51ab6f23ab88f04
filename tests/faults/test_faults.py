"""Every seeded fault applies to the code of today, and names tests that are there; ``make faults`` runs these."""

from __future__ import annotations

from pathlib import Path

from faults.run import apply, faults

ROOT = Path(__file__).parents[2]
FAULTS = faults()


def test_faults_apply() -> None:
    assert {fault.name: why for fault in FAULTS if (why := apply(fault, ROOT, check=True))} == {}


def test_faults_name_tests_that_are_there() -> None:
    for fault in FAULTS:
        for test in fault.tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).exists(), f"{fault.name} names {path}"
            assert f"def {name.partition('[')[0]}" in (ROOT / path).read_text() if name else True, (
                f"{fault.name} names {test}"
            )


def test_every_room_has_a_fault() -> None:
    rooms = {path.name for path in (ROOT / "zerograph").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert (rooms | {"passes", "runtime"}) - {fault.room for fault in FAULTS} == set()
