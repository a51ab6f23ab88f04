"""Finds zerograph in its repository. CMakeLists.txt installs this file where the install is an editable one.

scikit-build-core's own editable install makes more importable than a wheel does: it puts the repository on ``sys.path``
(seen in 0.10.7), and the folder above it, and on ``zerograph.__path__`` the repository (1.1.2). So ``import tests`` and
``import zerograph.tests`` work. It also lists the file of each module, and misses a module that became a package.
This finder knows the folders of the packages only, and leaves what is in them to Python.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location

REPOSITORY = r"@CMAKE_CURRENT_SOURCE_DIR@"
FOLDERS = {"zerograph": "zerograph", "zerograph.passes": "passes", "zerograph.runtime": "runtime"}
"""The folder of each package that is not in its parent's: ``wheel.packages`` of pyproject.toml."""


class InPlace:
    """An entry of ``sys.meta_path``."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Where the package ``name`` is, or None for a module that Python finds by itself."""
        if name not in FOLDERS:
            return None
        sources = os.path.join(REPOSITORY, FOLDERS[name])
        built = os.path.join(os.path.dirname(__file__), *name.split("."))  # where CMake installed the core
        init = os.path.join(sources, "__init__.py")
        return spec_from_file_location(name, init, submodule_search_locations=[sources, built])


sys.meta_path.insert(0, InPlace)
