"""`zerograph doctor` on the machine of the test, and its checks where something is missing.

Tests ``cli/checks/devices.py``, ``cli/checks/memory.py``, ``cli/checks/software.py`` and ``cli/checks/storage.py``.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from zerograph.cli import doctor as command
from zerograph.cli import main
from zerograph.cli.checks import Finding, attempt, devices, memory, software, storage


def test_the_report_of_this_machine(tmp_path: Path) -> None:
    run = CliRunner().invoke(main, ["doctor", "--json", "--path", str(tmp_path)])
    assert run.exit_code == 0, run.stderr
    data = json.loads(run.stdout)
    assert data["version"] == 1 and data["works"] is True
    found = {f["name"]: Finding(**f) for f in data["findings"]}
    assert list(found) == [name for name, _ in command.checks(tmp_path, deep=False)]
    for name in command.REQUIRED - {"torch.compile"}:
        assert found[name].state == "ok", found[name]
    assert {f.state for f in found.values()} <= {"ok", "warning", "missing"}
    assert not [f for f in found.values() if f.state == "ok" and f.mend]
    assert not list(tmp_path.iterdir())
    assert "Traceback" not in run.stderr


def test_each_finding_is_a_line_and_its_mend_another(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [Finding("torch", "ok", "2.13.0"), Finding("CUDA", "missing", "no driver", "install it")]
    monkeypatch.setattr(command, "checks", lambda path, deep: tuple((f.name, lambda f=f: f) for f in findings))
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert result.stdout == "ok       torch  2.13.0\nmissing  CUDA   no driver\n                mend: install it\n"
    assert result.stderr == "checking torch ...\nchecking CUDA ...\n"


def test_what_every_training_needs_decides_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Finding("C++ compiler", "missing", "no g++", "apt install g++")
    monkeypatch.setattr(command, "checks", lambda path, deep: (("C++ compiler", lambda: broken),))
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["works"] is False


def test_a_check_that_fails_itself_is_a_finding() -> None:
    def check() -> Finding:
        raise OSError(errno.EACCES, "not permitted")

    assert attempt("host", check) == Finding("host", "warning", "could not be checked: [Errno 13] not permitted")


def test_a_folder_that_is_none_is_a_wrong_call(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["doctor", "--path", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "does not exist" in result.stderr and "hint: " in result.stderr


def test_the_supported_torch_is_that_of_the_package() -> None:
    low, high = software.supported_torch()
    assert f'"torch>={low},<{high}"' in Path(__file__).parents[2].joinpath("pyproject.toml").read_text()


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_a_compiler_that_does_not_compile(monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    monkeypatch.setenv("CXX", compiler)
    found = software.compiler()
    assert found.state == "missing" and compiler in found.fact and "apt install" in found.mend


@pytest.mark.parametrize(
    ("output", "package"),
    [
        ("a.cc:2:10: fatal error: Python.h: No such file or directory", "-dev"),
        ("ld: cannot find -lgomp\nerror: ld\nomp", "libgomp1"),
        ("error: unrecognized command-line option '-std=c++20'", "10 or newer"),
    ],
)
def test_the_mend_follows_what_the_compiler_said(output: str, package: str) -> None:
    assert package in software._compiler_mend(output)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.ENOMEM])
def test_io_uring_refused(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(storage, "_try_io_uring", lambda: code)
    found = storage.io_uring()
    assert found.state == "warning" and found.mend
    assert found.fact.startswith(errno.errorcode[code])


def test_the_simd_target_is_the_one_in_use() -> None:
    """In processes of their own: the target is chosen once."""
    call = "from zerograph.cli.checks import software; print(software.native_core())"
    for forced, wanted in (("baseline", "SIMD target baseline (ZEROGRAPH_SIMD) of baseline"), ("sse9", "is no target")):
        run = subprocess.run(
            [sys.executable, "-c", call],
            env={**os.environ, "ZEROGRAPH_SIMD": forced},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert wanted in run.stdout and ("unset ZEROGRAPH_SIMD" in run.stdout or "state='ok'" in run.stdout)
        assert ("a pool of " in run.stdout) == (forced == "baseline")


def test_io_uring_is_asked_for_and_given_back() -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    code = storage._try_io_uring()
    assert code == 0 or code in errno.errorcode
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_direct_io_where_nothing_can_be_written() -> None:
    found = storage.direct_io(Path("/proc"))
    assert found.state == "missing" and "/proc (proc)" in found.fact and "--path" in found.mend


def test_direct_io_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(path: Path, *, direct: bool) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(storage, "open_scratch", refuse)
    assert storage.direct_io(tmp_path).state == "warning"


def test_the_io_engine_is_the_one_that_offloading_uses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZEROGRAPH_IO", "threads")
    found = storage.io_engine(tmp_path)
    assert found.state == "ok" and found.fact.startswith(f"threads (ZEROGRAPH_IO) on {tmp_path}: ")
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("ZEROGRAPH_IO", "tape")
    found = storage.io_engine(tmp_path)
    assert found.state == "missing" and "'tape'" in found.fact and "ZEROGRAPH_IO=" in found.mend
    monkeypatch.delenv("ZEROGRAPH_IO")
    assert storage.io_engine(Path("/proc")).state == "missing"


def test_memory_of_another_process_and_huge_pages_are_tried() -> None:
    assert memory.shared_memory().state in ("ok", "warning")
    assert memory.huge_pages().state in ("ok", "warning")
    assert memory.memlock().name == "memlock limit"


def test_no_driver_is_read_from_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    assert devices.cuda().fact == "no NVIDIA driver"
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025\n")
    monkeypatch.setattr(devices, "_DRIVER", version)
    found = devices.cuda()
    assert "driver 570.86.15" in found.fact and "has no CUDA" in found.fact and "pip install" in found.mend


@pytest.mark.slow
def test_deep_really_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.inductor() == Finding("torch.compile", "ok", "compiled a small function, and the result is right")
    monkeypatch.setattr(software, "_STEP", "raise RuntimeError('no kernel')")
    found = software.inductor()
    assert found.state == "missing" and found.fact == "RuntimeError: no kernel" and found.mend
