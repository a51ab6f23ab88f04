"""What importing zerograph does, and what it leaves alone."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest

import zerograph


def _python(code: str, folder: str) -> str:
    run = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd=folder, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_importing_zerograph_does_not_import_torch(tmp_path: object) -> None:
    modules = "zerograph, zerograph.planner, " + ", ".join(f"zerograph.core.{m}" for m in ("config", "plan", "step"))
    assert _python(f"import sys, {modules}; print('torch' in sys.modules)", str(tmp_path)) == "False"


def test_every_public_name_resolves() -> None:
    for name in zerograph.__all__:
        assert getattr(zerograph, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'fully_shard'"):
        zerograph.fully_shard


def test_names_stay_callable_after_submodules_are_imported(tmp_path: object) -> None:
    code = """
import importlib, pkgutil, zerograph
before = zerograph.backend
for module in pkgutil.iter_modules(zerograph.__path__):
    importlib.import_module(f"zerograph.{module.name}")
assert zerograph.backend is before
print(*sorted(n for n in zerograph.__all__ if not callable(getattr(zerograph, n))))
"""
    assert _python(code, str(tmp_path)) in ("__version__", "__version__ optim")


def test_passes_and_runtime_are_packages_of_zerograph_only() -> None:
    files = importlib.metadata.files("zerograph") or []
    assert files
    assert not {file.parts[0] for file in files} & {"passes", "runtime", "csrc", "tests"}
    for name in ("zerograph.passes", "zerograph.runtime"):
        assert importlib.util.find_spec(name) is not None
