"""What importing zerograph does, and what it leaves alone."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import zerograph

ROOT = Path(__file__).parent.parent


def _python(code: str, folder: str, *arguments: str, flags: str = "-I") -> str:
    command = [sys.executable, flags, "-c", code, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_importing_zerograph_does_not_import_torch(tmp_path: object) -> None:
    modules = "zerograph, zerograph.core.step, zerograph.core.plan, zerograph.core.config, zerograph.planner"
    assert _python(f"import sys, {modules}; print('torch' in sys.modules)", str(tmp_path)) == "False"


def test_triton_is_imported_by_what_runs_on_a_gpu_only(tmp_path: object) -> None:
    modules = "zerograph, zerograph.optim, zerograph.runtime.comm.collectives, zerograph.runtime.kernels"
    assert _python(f"import sys, {modules}; print('triton' in sys.modules)", str(tmp_path)) == "False"


def test_private_names_of_torch_are_imported_in_one_file_per_room() -> None:
    root, found = Path(zerograph.__file__).parents[1], []
    for path in (p for folder in ("zerograph", "passes", "runtime") for p in (root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            found += [f"{path}: {n}" for n in names if n.startswith("torch.") and "._" in n]
    assert not [line for line in found if "torch_private.py: " not in line]
    assert found


def test_every_public_name_resolves() -> None:
    for name in zerograph.__all__:
        assert getattr(zerograph, name) is not None


def test_a_backend_offers_what_users_call() -> None:
    offered = {name for name in dir(zerograph.backend()) if not name.startswith("_")}
    assert offered == {"config", "frames", "no_sync", "plan", "program", "record", "refresh", "report"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'fully_shard'"):
        zerograph.fully_shard


def test_names_stay_callable_after_submodules_are_imported(tmp_path: object) -> None:
    code = """
import importlib, pkgutil, zerograph
before = zerograph.backend
for name in ("passes", "runtime", *(module.name for module in pkgutil.iter_modules(zerograph.__path__))):
    importlib.import_module(f"zerograph.{name}")
assert zerograph.backend is before
print(*sorted(n for n in zerograph.__all__ if not callable(getattr(zerograph, n))))
"""
    assert _python(code, str(tmp_path)) in ("__version__ errors", "__version__ errors optim")


def test_passes_and_runtime_are_packages_of_zerograph_only() -> None:
    files = importlib.metadata.files("zerograph") or []
    assert files
    assert not {file.parts[0] for file in files} & {"passes", "runtime", "csrc", "tests"}
    for name in ("zerograph.passes", "zerograph.runtime"):
        assert importlib.util.find_spec(name) is not None


def test_no_other_folder_of_the_repository_is_importable(tmp_path: Path) -> None:
    code = """
import sys
from importlib.util import find_spec
from pathlib import Path
root = Path(sys.argv[1])
folders = [folder for folder in root.iterdir() if folder.is_dir() and folder.name.isidentifier()]
names = {name: str(folder) for folder in folders for name in (folder.name, f"zerograph.{folder.name}")}
found = {name: spec.submodule_search_locations or () for name in names if (spec := find_spec(name))}
leaks = [name for name, locations in found.items() if names[name] in locations]
print(*sorted(set(leaks) - {"zerograph", "zerograph.passes", "zerograph.runtime"}))
print(*{str(root), *map(str, root.parents)} & set(sys.path))
"""
    assert _python(code, str(tmp_path), str(ROOT)) == ""


FINDER = """
import importlib, json, site, sys
from pathlib import Path
site.addsitedir("site")
import _zerograph_in_place, zerograph.built, zerograph.passes
Path("zerograph/room").mkdir()
Path("zerograph/step.py").rename("zerograph/room/step.py")
Path("zerograph/plan").mkdir()
Path("zerograph/plan.py").rename("zerograph/plan/__init__.py")
Path("passes/tile.py").touch()
importlib.invalidate_caches()
import zerograph.passes.tile, zerograph.plan, zerograph.room.step
assert zerograph.passes.tile.__file__ == str(Path("passes/tile.py").absolute())
for name in ("passes", "tests", "zerograph.step", "zerograph.tests"):
    assert importlib.util.find_spec(name) is None, name
print(json.dumps(_zerograph_in_place.FOLDERS))
"""


def test_an_editable_install_follows_its_packages_folders(tmp_path: Path) -> None:
    """The finder by itself, over small folders: modules come and move without another install."""
    for file in ("zerograph/__init__.py", "zerograph/step.py", "zerograph/plan.py", "site/zerograph/built.py"):
        tmp_path.joinpath(file).parent.mkdir(parents=True, exist_ok=True)
        tmp_path.joinpath(file).touch()
    for file in ("passes/__init__.py", "tests/__init__.py"):
        tmp_path.joinpath(file).parent.mkdir()
        tmp_path.joinpath(file).touch()
    finder = ROOT.joinpath("cmake", "in_place.py").read_text().replace("@CMAKE_CURRENT_SOURCE_DIR@", str(tmp_path))
    tmp_path.joinpath("site", "_zerograph_in_place.py").write_text(finder)
    tmp_path.joinpath("site", "zerograph-in-place.pth").write_text("import _zerograph_in_place\n")

    folders = json.loads(_python(FINDER, str(tmp_path), flags="-IS"))  # without what is installed
    packages = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]["packages"]
    assert folders == {name.replace("/", "."): folder for name, folder in packages.items()}
