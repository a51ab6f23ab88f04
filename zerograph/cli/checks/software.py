"""Python, torch, the native core, and the compiler that Inductor calls."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from zerograph.cli.checks.finding import Finding, first_line

_SOURCE = """
#include <Python.h>
#include <omp.h>
#include <vector>
int threads() { std::vector<int> found(static_cast<std::size_t>(omp_get_max_threads())); return (int)found.size(); }
"""
_STEP = """
import torch, torch._inductor
torch._inductor.config.cpp_cache_precompile_headers = False  # one kernel compiles faster than the headers
function = torch.compile(lambda x: (x.sin() + 1).sum())
for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
    x = torch.ones(64, device=device)
    torch.testing.assert_close(function(x), (x.sin() + 1).sum())
"""
DEEP_LIMIT = 300.0
"""Seconds that ``--deep`` gives Inductor."""


def python() -> Finding:
    """The interpreter is one that ZeroGraph supports."""
    fact = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info < (3, 13):  # an older one than 3.11 does not get here
        return Finding("Python", "ok", fact)
    return Finding("Python", "warning", f"{fact}, tested with 3.11 and 3.12", "python3.12 -m venv .venv")


def torch() -> Finding:
    """torch can be imported, and is of a version that ZeroGraph supports."""
    low, high = supported_torch()
    mend = f"pip install 'torch>={low},<{high}'"
    try:
        import torch
    except Exception as error:  # a broken library is as bad as none
        return Finding("torch", "missing", f"cannot be imported: {first_line(error)}", mend)
    version = torch.__version__
    if _numbers(low) <= _numbers(version) < _numbers(high):
        return Finding("torch", "ok", f"{version}, supported are {low} and newer, below {high}")
    return Finding("torch", "missing", f"{version}, supported are {low} and newer, below {high}", mend)


def supported_torch() -> tuple[str, str]:
    """First supported version of torch, and the first one that is not; as the installed package says."""
    for requirement in importlib.metadata.requires("zerograph") or ():
        low = re.match(r"torch\b[^;]*>=\s*([\d.]+)", requirement)
        high = re.match(r"torch\b[^;]*<\s*([\d.]+)", requirement)
        if low and high:
            return low[1], high[1]
    raise LookupError("the installed zerograph does not say which torch it needs")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"[\d.]*\d", version)[0].split(".")[:2])  # type: ignore[index]


def native_core() -> Finding:
    """The C++ extension loads, and its kernels use what the processor has."""
    try:
        import zerograph._core as _core
    except ImportError as error:
        fact = f"cannot be imported: {first_line(error)}"
        return Finding("native core", "missing", fact, "pip install --force-reinstall --no-deps zerograph")
    targets, forced = _core.kernel_targets(), os.environ.get("ZEROGRAPH_SIMD")
    try:
        used = _core.simd_target()
    except ValueError as error:
        return Finding("native core", "missing", first_line(error), "unset ZEROGRAPH_SIMD")
    best = "avx512" if "avx512bw" in _flags() else "avx2" if "avx2" in _flags() else targets[-1]
    fact = f"SIMD target {used}{' (ZEROGRAPH_SIMD)' if forced else ''} of {', '.join(targets)}"
    fact += f", a pool of {_core.pool_threads()} threads"
    if used == best:
        return Finding("native core", "ok", fact)
    mend = "pip install --no-binary zerograph zerograph  # with a newer compiler"
    if best in targets:
        mend = "unset ZEROGRAPH_SIMD"
    return Finding("native core", "warning", f"{fact}; this processor has {best}", mend)


def _flags() -> set[str]:
    text = Path("/proc/cpuinfo").read_text()
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(match[1].split()) if match else set()


def compiler() -> Finding:
    """The C++ compiler that Inductor calls builds a library with OpenMP and Python's headers, as Inductor does."""
    name = os.environ.get("CXX") or "g++"
    found = shutil.which(name)
    if found is None:
        return Finding("C++ compiler", "missing", f"no {name}", "apt install g++  # or export CXX=clang++")
    with tempfile.TemporaryDirectory(prefix="zerograph-doctor-") as folder:
        source, library = Path(folder, "a.cc"), Path(folder, "a.so")
        source.write_text(_SOURCE)
        headers = sysconfig.get_path("include")
        command = [found, "-std=c++20", "-O1", "-shared", "-fPIC", "-fopenmp", f"-I{headers}", str(source)]
        run = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True, timeout=60, check=False)
    if run.returncode == 0:
        return Finding("C++ compiler", "ok", f"{found} {_version(found)}")
    return Finding("C++ compiler", "missing", f"{found}: {_complaint(run.stderr)}", _compiler_mend(run.stderr))


def _version(compiler: str) -> str:
    run = subprocess.run([compiler, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, check=False)
    return run.stdout.strip()


def _complaint(output: str) -> str:
    lines = [line for line in output.splitlines() if "error" in line] or output.splitlines() or ["no output"]
    return lines[0][:200]


def _compiler_mend(output: str) -> str:
    if "Python.h" in output:
        return f"apt install python{sys.version_info.major}.{sys.version_info.minor}-dev"
    return "apt install libgomp1 g++" if "omp" in output else "apt install g++  # 10 or newer, for C++20"


def inductor() -> Finding:
    """torch.compile really compiles a small function and gets the right result; in a process and cache of its own."""
    with tempfile.TemporaryDirectory(prefix="zerograph-doctor-") as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        command = [sys.executable, "-W", "ignore", "-c", _STEP]
        try:
            run = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=DEEP_LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            return Finding("torch.compile", "missing", f"no result in {DEEP_LIMIT:.0f} s", "zerograph doctor --deep")
    if run.returncode == 0:
        return Finding("torch.compile", "ok", "compiled a small function, and the result is right")
    last = [line for line in run.stderr.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
    fact = first_line(last[-1]) if last else f"ended with code {run.returncode}"
    return Finding("torch.compile", "missing", fact, "mend the C++ compiler or Triton above, then run this again")
