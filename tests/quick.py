"""What `make test` does less of than `make test-full`: see :func:`conftest.pytest_collection_modifyitems` too."""

from __future__ import annotations

from hypothesis import settings


def examples(most: int) -> int:
    """How many examples a property is tried on: ``most`` in the profile "full", few in the default one."""
    return min(most, settings.default.max_examples)
