"""The kind of a JSON file that was given in place of another one. No torch in here."""

from __future__ import annotations

from zerograph.core.errors import ConfigError

_KINDS = (
    ("a plan", {"plan", "spans", "digest"}, "`zerograph show`, `diff`, `check` and `passes` read plans"),
    ("a machine", {"device_memory", "matmul"}, "it is for --machine"),
    ("a measured run", {"segments", "gathers", "update"}, "it is for `zerograph show PLAN --measured`"),
    ("the config of a Hugging Face model", {"model_type"}, "`zerograph plan` and `estimate` take it as MODEL"),
)
"""Name, the fields that only this kind has, and what reads it."""


def refuse_other_kind(data: object, wanted: str, hint: str) -> None:
    """Nothing, unless ``data`` is of a kind that ZeroGraph knows, and not the one that was ``wanted``.

    Raises:
        ConfigError: saying what the file is, and what reads it.
    """
    for kind, fields, readers in _KINDS:
        if kind != wanted and isinstance(data, dict) and fields <= data.keys():
            raise ConfigError(f"this is {kind}, not {wanted}", f"{readers}; {hint}")
