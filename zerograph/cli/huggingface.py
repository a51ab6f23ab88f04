"""``MODEL`` that is a Hugging Face ``config.json``: the causal language model that it describes, without weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from zerograph.core.errors import ConfigError
from zerograph.core.files.kinds import read_as, refuse_other_kind

NO_MODEL = "give the config.json of a Hugging Face model, or file.py:callable"


def config_maker(path: Path, batch: int, seq: int) -> Callable[[], Any]:
    """A callable that returns the model and inputs for training it: ``batch`` by ``seq`` token ids, and labels.

    Parameters are float32, whatever the config says: they are the master copies. Nothing is downloaded, and code that a
    config names is not run.

    Raises:
        ConfigError: no such file, not the config of a model that transformers knows, or no transformers.
    """
    data = read_as(path, _parse, "paths are relative to the current folder")
    transformers = _transformers(path)
    kind = data["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"{path}: transformers {transformers.__version__} knows no model_type {kind!r}",
            "a newer transformers may: pip install -U transformers; else give file.py:callable that builds the model",
        )
    config = _or_config_error(path, lambda: transformers.CONFIG_MAPPING[kind].from_dict(data))
    config.use_cache = False  # a training step returns no keys and values
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{path}: transformers has no causal language model of model_type {kind!r}",
            "give file.py:callable that builds the model and its inputs",
        )
    return lambda: _made(path, transformers, config, batch, seq)


def _made(path: Path, transformers: ModuleType, config: Any, batch: int, seq: int) -> tuple[Any, dict[str, Any]]:
    import torch

    model = _or_config_error(
        path, lambda: transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    )
    ids = torch.zeros(batch, seq, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


def _parse(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text, object_hook=_number)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"this is no JSON: {error}", NO_MODEL) from None
    refuse_other_kind(data, "the config of a Hugging Face model", NO_MODEL)
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise ConfigError("there is no model_type", NO_MODEL)
    return data


def _number(data: dict[str, Any]) -> Any:
    """The value of an object of JSON: transformers writes infinity, a limit in configs of Mamba 2, as an object."""
    named = data.get("__float__") if len(data) == 1 else None
    return float(named) if named in ("Infinity", "-Infinity", "NaN") else data


def _transformers(path: Path) -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{path} is read by transformers, which cannot be imported: {error}",
            "pip install '.[hf]' in the clone of zerograph",
        ) from None
    return transformers  # type: ignore[no-any-return]


def _or_config_error(path: Path, build: Callable[[], Any]) -> Any:
    """The result of ``build``. Classes of models check their configs each in its own way, with errors of all kinds."""
    try:
        return build()
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} makes no model: {type(error).__name__}: {reason}", "mend the config") from error
