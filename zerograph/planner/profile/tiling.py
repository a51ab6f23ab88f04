"""In how many tiles the user wants which parameters (``zerograph.backend(tile=...)``)."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from zerograph.core.config import TileOption
from zerograph.core.errors import ConfigError
from zerograph.core.step import Param, Step


def tiles_wanted(wanted: TileOption, step: Step, bucket_size: int) -> dict[str, int]:
    """Tiles of each parameter of ``step`` that is to be in several.

    A number is that of parameters that are larger than a bucket and can be in tiles; patterns name theirs, of which the
    first counts that fits, and vectors that they fit too stay untiled.

    Raises:
        ConfigError: a parameter that was named cannot be in tiles, or not in so many.
    """
    if isinstance(wanted, str):
        return {}
    tilable = set(step.tilable or ())
    if isinstance(wanted, int):
        large = (p for p in step.params if p.name in tilable and p.gathered_bytes > bucket_size)
        found = dict.fromkeys(large, wanted)
    else:
        named = ((p, tiles_of(p.name, wanted)) for p in step.params if len(p.shape) > 1)
        found = {p: tiles for p, tiles in named if tiles > 1}
    for param, tiles in found.items():
        _require_tilable(param, tiles, tilable)
    return {p.name: tiles for p, tiles in found.items() if tiles > 1}


def tiles_of(name: str, patterns: Iterable[tuple[str, int]]) -> int:
    """How many tiles ``patterns`` have for the parameter of that name; 1 where none fits."""
    return next((tiles for pattern, tiles in patterns if fnmatchcase(name, pattern)), 1)


def _require_tilable(param: Param, tiles: int, tilable: set[str]) -> None:
    if param.name not in tilable:
        raise ConfigError(
            f"tile= wants {param.name} {list(param.shape)} in {tiles} tiles, and not only products and lookups use it, "
            "or it is not sharded",
            "tiles are of weights that nothing but products (x @ W.T, as nn.Linear's, and x @ W) and lookups "
            "(nn.Embedding) use: name others in the pattern",
        )
    rows = param.chunk
    if tiles > rows:
        raise ConfigError(
            f"tile= wants {param.name} {list(param.shape)} in {tiles} tiles, and each of {param.home.ranks} ranks has "
            f"{rows} rows of it",
            f"{rows} tiles are the most",
        )


def refuse_unknown(wanted: TileOption, names: Iterable[str]) -> None:
    """Raises:
    ConfigError: a pattern fits none of the model's parameters.
    """
    known = list(names)
    for pattern, _ in wanted if isinstance(wanted, tuple) else ():
        if known and not any(fnmatchcase(name, pattern) for name in known):
            raise ConfigError(
                f"tile= has the pattern {pattern!r}, and no parameter of the model is called so",
                f"names are such as {known[0]!r}, and * stands for anything",
            )
