"""Which test catches each of the seeded faults: ``make faults``, or ``tests/faults/run.py [NAME ...]``.

A fault is a patch beside this file: one plausible mistake that would hurt a user. Its opening lines say what is wrong
and what a user would see, and name the tests that should catch it. The quick ones of these (those of ``make test``) run
in a copy of the repository with the fault, up to the first failure; where all pass, the whole quick suite does. In the
end the tests that caught something run without a fault: one that fails then has caught nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ALLOWED = 2
"""Faults that may be missed."""

QUICK = ("-m", "not slow")
SUITE = ("tests", *QUICK, "-n", "2", "--dist", "worksteal")
MISSED = "MISSED"

POINTER = """import _zerograph_in_place
_zerograph_in_place.REPOSITORY = {root!r}
"""
"""A ``sitecustomize.py``, which lets the editable install find zerograph in another folder than it was made in."""

FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)
"""A line of pytest's summary, with the test that failed, or the file that could not be imported."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A patch.

    Attributes:
        name: of its file.
        room: the folder whose code it changes.
        says: what is broken, and what a user would see.
        tests: files or single tests that should catch it, in the order to try.
    """

    name: str
    room: str
    says: str
    tests: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Fault:
        """The fault of a patch.

        Raises:
            ValueError: it has no sentence, no line ``tests:``, or changes no code.
        """
        opening, found, diff = path.read_text().partition("\ndiff --git ")
        says, named, tests = opening.partition("\ntests:")
        changed = re.search(r"^\+\+\+ b/(?:zerograph/)?(\w+)", diff, re.MULTILINE)
        if not (found and named and says.strip() and tests.split() and changed):
            raise ValueError(f"{path.name}: a sentence, a line 'tests: FILE ...' and a diff are needed")
        return cls(path.stem, changed[1], " ".join(says.split()), tuple(tests.split()))

    @property
    def path(self) -> Path:
        """Its file."""
        return HERE / f"{self.name}.patch"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one fault: the test that caught it or why none did, after how many seconds."""

    fault: str
    room: str
    caught_by: str
    seconds: float

    @property
    def missed(self) -> bool:
        """Whether no test caught it."""
        return self.caught_by.startswith(MISSED)


def faults() -> list[Fault]:
    """All of them."""
    return [Fault.read(path) for path in sorted(HERE.glob("*.patch"))]


def apply(fault: Fault, root: Path, *, check: bool = False) -> str:
    """Apply ``fault`` in the repository or copy at ``root``, or only ``check``; returns why it does not, if so."""
    # No repository that a copy may lie in is asked: git would skip what is not of it.
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(root.parent)}
    command = ["git", "apply", *(["--check"] if check else []), str(fault.path)]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False).stderr.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Try faults, print a line for each as it ends; 1 where more than :data:`ALLOWED` are missed."""
    options = _parser().parse_args(arguments)
    chosen = [f for f in faults() if not options.names or any(name in f.name for name in options.names)]
    if not chosen:
        print(f"error: no fault is called {' or '.join(options.names)}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="zerograph-faults-") as folder:
        clean, verdicts = _copied(ROOT, Path(folder, "clean")), list[Verdict]()
        _require_own(clean)
        for fault in chosen:
            named = (*fault.tests, *QUICK)
            suites = [options.tests] if options.tests else [named] if options.named else [named, SUITE]
            verdicts.append(_tried(fault, clean, suites))
            print(_line(verdicts[-1]), flush=True)
            _write(verdicts, options.json)
        verdicts = _confirmed(verdicts, clean)
    _write(verdicts, options.json)
    missed = [verdict for verdict in verdicts if verdict.missed]
    print("".join(f"\n{verdict.fault}: {verdict.caught_by}" for verdict in missed))
    print(f"\n{len(verdicts) - len(missed)} of {len(verdicts)} faults are caught; {ALLOWED} may be missed")
    return int(len(missed) > ALLOWED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tests/faults/run.py", description="Which test catches each of the seeded faults.")
    parser.add_argument("names", nargs="*", help="faults whose names contain one of these; all, unless given")
    parser.add_argument("--named", action="store_true", help="run the tests that a fault names, never the whole suite")
    parser.add_argument("--tests", type=shlex.split, help="run these instead: arguments of pytest, in one string")
    parser.add_argument("--json", type=Path, help="write what is found to this file, fault by fault")
    return parser


def _line(verdict: Verdict) -> str:
    return f"{verdict.room:<13}{verdict.fault:<44}{verdict.seconds:>6.0f} s  {verdict.caught_by}"


def _write(verdicts: Sequence[Verdict], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))


def _tried(fault: Fault, clean: Path, suites: Iterable[Sequence[str]]) -> Verdict:
    """What the first failing test of ``suites`` is, each run in a copy of ``clean`` with the fault."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir=clean.parent) as folder:
        root = _copied(clean, Path(folder, "zerograph"))
        why = apply(fault, root)
        found = [[f"{MISSED}: it does not apply: {why}"]] if why else (_failures(root, ("-x", *s)) for s in suites)
        caught_by = next((failures[0] for failures in found if failures), MISSED)
    return Verdict(fault.name, fault.room, caught_by, round(time.monotonic() - begun, 1))


def _confirmed(verdicts: Sequence[Verdict], clean: Path) -> list[Verdict]:
    """``verdicts``, in which tests that fail without a fault too have caught none."""
    anyway = _failures(clean, dict.fromkeys(verdict.caught_by for verdict in verdicts if not verdict.missed))
    wrong = {test: f"{MISSED}: {test} fails without the fault too" for test in anyway}
    return [replace(verdict, caught_by=wrong.get(verdict.caught_by, verdict.caught_by)) for verdict in verdicts]


def _failures(root: Path, suite: Iterable[str]) -> list[str]:
    """The tests of a ``suite`` (arguments of pytest) that fail in the copy at ``root``."""
    if not suite:
        return []
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--timeout=300", "--hypothesis-seed=0", *suite]
    run = subprocess.run(command, cwd=root, env=_environment(root), capture_output=True, text=True, check=False)
    found = [match[1] for match in FAILURE.finditer(run.stdout)]
    if not found and run.returncode in _MISTAKEN:
        raise SystemExit(f"error: pytest cannot run {' '.join(suite)}\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    # Without a summary pytest's own process has ended, in whichever of these.
    return found or [next(test for test in suite if test.startswith("tests"))] * bool(run.returncode)


_MISTAKEN = (2, 3, 4, 5)
"""Exit codes of pytest: interrupted, broken, called with wrong arguments, or without any test."""


def _environment(root: Path) -> dict[str, str]:
    """Ours, where Python finds zerograph in ``root``."""
    paths = [str(root / "build" / "pointer"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def _require_own(root: Path) -> None:
    """Refuse to go on where a run in the copy at ``root`` would test other code than that."""
    command = [sys.executable, "-c", "import zerograph; print(zerograph.__file__)"]
    run = subprocess.run(command, cwd=root, env=_environment(root), capture_output=True, text=True, check=False)
    if Path(run.stdout.strip()) != root / "zerograph" / "__init__.py":
        raise SystemExit(f"error: Python does not find zerograph in {root}\n{run.stderr}\nhint: pip install -e .")


def _copied(source: Path, target: Path) -> Path:
    """A copy of the repository's folders, with the bytecode that is there: its files keep their times."""
    names = subprocess.run(
        ["git", "ls-tree", "--name-only", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in names.stdout.split():
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, symlinks=True)
        elif (source / name).exists():
            target.mkdir(exist_ok=True)
            shutil.copy2(source / name, target / name)
    pointer = target / "build" / "pointer"
    pointer.mkdir(parents=True)
    pointer.joinpath("sitecustomize.py").write_text(POINTER.format(root=str(target)))
    return target


if __name__ == "__main__":
    sys.exit(main())
