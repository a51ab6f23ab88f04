"""Every argument of every function that users call: a wrong one is an error that names it, and nothing is dropped.

Tests ``core/arguments.py``. The arguments of ``zerograph.backend`` are those of tests/core/test_config.py.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zerograph
from zerograph.core.errors import CheckpointError, ConfigError
from zerograph.optim.host import HostOptimizer


def _model() -> nn.Linear:
    return nn.Linear(4, 2)


def _with_gradients() -> list[nn.Parameter]:
    model = _model()
    model(torch.ones(1, 4)).sum().backward()
    return list(model.parameters())


def _sharded_meta() -> nn.Module:
    with torch.device("meta"):
        model = _model()
    return zerograph.shard(model, zerograph.backend())


def _gathered(module: Any, **options: Any) -> None:
    with zerograph.gathered(module, **options):
        pass


def _step(optimizer: type[HostOptimizer], params: Any = None, **options: Any) -> None:
    later = {k: options.pop(k) for k in ("grad_scale", "clip") if k in options}
    stages = options.pop("stages", None)  # an attribute
    made = optimizer(params or _with_gradients(), **options)
    made.stages = stages
    made.step(**later)


Call = Callable[..., Any]
CALLS: dict[str, tuple[Call, Call]] = {
    # The function, and what of its arguments is right, made anew for each call.
    "Backend": (zerograph.Backend, lambda: {"config": zerograph.backend().config}),
    "backend": (zerograph.backend, dict),
    "backend_of": (zerograph.backend_of, lambda: {"model": zerograph.shard(_model(), zerograph.backend())}),
    "clip_grad_norm_": (zerograph.clip_grad_norm_, lambda: {"parameters": _with_gradients(), "max_norm": 1.0}),
    "export": (zerograph.export, lambda: {"model": _model(), "path": "model.safetensors"}),
    "gathered": (_gathered, lambda: {"module": _model()}),
    "materialize": (zerograph.materialize, lambda: {"model": _sharded_meta()}),
    "norms": (zerograph.norms, lambda: {"model": _model()}),
    "shard": (zerograph.shard, lambda: {"model": _model(), "backend": zerograph.backend()}),
    **{
        f"optim.{name}": (_step, lambda name=name: {"optimizer": getattr(zerograph.optim, name)})
        for name in ("Adagrad", "Adam", "AdamW", "LAMB", "Lion", "SGD")
    },
    "optim.Muon": (_step, lambda: {"optimizer": zerograph.optim.Muon, "params": _with_gradients()[:1]}),
    "optim.OneBitAdam": (_step, lambda: {"optimizer": zerograph.optim.OneBitAdam, "freeze_step": 2}),
}

MODELS = [None, "model", [_model()], _model, 3, {}]
FLAGS = [None, "yes", 1, [], torch.ones(2)]
NUMBERS = [None, "1", [], {}, torch.ones(2), math.nan, -1.0]
PATHS = ["model.safetensors", Path("model.safetensors"), ["a.safetensors"], ""]

WRONG: dict[str, dict[str, list[Any]]] = {
    "Backend": {"config": [None, {"stage": 3}, 3]},
    "backend": {"path": ["", [""], 3, {}], "mesh": [torch.ones(2), [0, 1]], "plan": [3, []], "stages": [3]},
    "backend_of": {"model": MODELS},
    "clip_grad_norm_": {
        "parameters": [None, "", 3, [1], [None], _model(), {"weight": 1}],
        "max_norm": NUMBERS,
        "norm_type": [*NUMBERS, 0, "two"],
        "error_if_nonfinite": FLAGS,
        "stages": ["pp", 2, [0, 1], _model()],
    },
    "export": {"model": MODELS, "path": [None, "", ".", 3, b"a", [], torch.ones(2)]},
    "gathered": {"module": MODELS, "writeback": [*FLAGS, _model()]},
    "materialize": {
        "model": MODELS,
        "init": [*PATHS, {}, 3, torch.ones(2), _model()],
        "files": ["", [], (), iter([]), {}, 3, [1], [""], [None], torch.ones(2)],
    },
    "norms": {"model": MODELS, "norm_type": [*NUMBERS, 0]},
    "shard": {
        "model": MODELS,
        "backend": [None, "zerograph", zerograph.backend, {}],
        "device": ["", "disk", "meta", "xla", 3, [], Path("cpu"), torch.ones(2)],
    },
    **{
        name: {
            "skip_nonfinite": FLAGS,
            "overlap": FLAGS,
            "delayed": FLAGS,
            "warmup": [None, "3", 1.5, -1, True],
            "clip": [value for value in [*NUMBERS, 0] if value is not None],
            "stages": ["pp", 2, [0, 1], _model()],
            "grad_scale": ["1", [], {}, torch.ones(2), 0],
            "master": [3, "float32", torch.bfloat16],
        }
        for name in CALLS
        if name.startswith("optim.")
    },
}
for _name in ("optim.LAMB", "optim.Muon", "optim.OneBitAdam"):
    del WRONG[_name]["warmup"]
for _argument in ("skip_nonfinite", "master"):
    del WRONG["optim.OneBitAdam"][_argument]
for _name, _more in {
    "optim.Adam": {"moments": [3, "float32", torch.float16]},
    "optim.AdamW": {"moments": [3, "float32", torch.float16]},
    "optim.Lion": {
        "lr": NUMBERS,
        "weight_decay": NUMBERS,
        "betas": [None, 0.9, (0.9,), (0.9, 1.0), (0.9, "x"), (0.9, 0.9, 0.9)],
        "maximize": FLAGS,
    },
    "optim.LAMB": {
        **dict.fromkeys(("lr", "weight_decay", "eps"), NUMBERS),
        "betas": [None, 0.9, (0.9,), (0.9, 1.0), (0.9, "x"), (0.9, 0.9, 0.9)],
    },
    "optim.Muon": {
        **dict.fromkeys(("lr", "weight_decay", "momentum", "eps"), NUMBERS),
        "nesterov": FLAGS,
        "ns_coefficients": [None, 1.0, (1.0, 2.0), (1.0, 2.0, math.nan), "abc"],
        "ns_steps": [None, "5", 5.0, True, -1, 100],
        "adjust_lr_fn": [3, "mine", [], torch.ones(2)],
    },
    "optim.OneBitAdam": {
        **dict.fromkeys(("lr", "weight_decay", "eps"), NUMBERS),
        "betas": [None, 0.9, (0.9,), (0.9, 1.0), (0.9, "x"), (0.9, 0.9, 0.9)],
        "freeze_step": [None, "3", 1.5, 0, -1, True, torch.ones(2)],
    },
}.items():
    WRONG[_name] = {**WRONG[_name], **_more}


@pytest.mark.parametrize(("function", "argument"), [(f, a) for f, arguments in WRONG.items() for a in arguments])
def test_a_wrong_argument_is_an_error_that_names_it(
    function: str, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, right = CALLS[function]
    for wrong in WRONG[function][argument]:
        with pytest.raises(ConfigError) as caught:
            call(**{**right(), argument: wrong})
        named = "Module" if argument in ("model", "module") else argument
        assert named.lower() in str(caught.value).lower() and caught.value.hint, wrong
        assert len(str(caught.value)) < 400, "no page of a model's own text"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("function", [f for f in CALLS if f != "backend"])
def test_right_arguments_pass(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, right = CALLS[function]
    call(**right())


def test_no_function_and_no_argument_is_left_out() -> None:
    optimizers = {f"optim.{name}" for name in zerograph.optim.__all__} - {"optim.clip_grad_norm_"}
    assert {*zerograph.__all__} - {"__version__", "errors", "optim"} | optimizers == set(CALLS)
    for name in ("backend_of", "clip_grad_norm_", "export", "gathered", "materialize", "norms", "shard"):
        assert set(inspect.signature(getattr(zerograph, name)).parameters) == set(WRONG[name]), name


def test_a_path_in_the_place_of_init_is_reported_where_it_belongs() -> None:
    with pytest.raises(ConfigError, match=r"init must be .* got 'weights.safetensors'") as caught:
        zerograph.materialize(_sharded_meta(), "weights.safetensors")
    assert "zerograph.materialize(model, files='weights.safetensors')" in caught.value.hint


def test_files_are_read_or_refused(tmp_path: Path) -> None:
    values = {"weight": torch.randn(2, 4), "bias": torch.randn(2)}
    save_file(values, tmp_path / "model.safetensors")
    for files in (tmp_path / "model.safetensors", str(tmp_path / "model.safetensors"), tmp_path.glob("*.safetensors")):
        model = zerograph.materialize(_sharded_meta(), files=files)
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    for model in (_model(), zerograph.materialize(_sharded_meta())):
        with pytest.raises(ConfigError, match="files= would not be read"):
            zerograph.materialize(model, files=[tmp_path / "model.safetensors"])


def test_an_export_to_a_folder_is_refused_before_anything_is_gathered(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"it is a folder") as caught:
        zerograph.export(_model(), tmp_path)
    assert caught.value.hint == str(tmp_path / "model.safetensors")
    assert not list(tmp_path.parent.glob(".*partial"))


def test_a_device_is_where_the_model_is() -> None:
    assert zerograph.shard(_model(), zerograph.backend(), "cpu") is not None
    with torch.device("meta"):
        model = _model()
    assert zerograph.materialize(zerograph.shard(model, zerograph.backend(), torch.device("cpu"))).weight.is_cpu


def test_an_infinite_norm_is_asked_for_as_in_torch() -> None:
    ours, theirs = _with_gradients(), _with_gradients()
    for norm_type in ("inf", math.inf, 2, 1.5):
        found = zerograph.clip_grad_norm_(iter(ours), torch.tensor(0.5), norm_type)
        assert torch.allclose(found, torch.nn.utils.clip_grad_norm_(theirs, 0.5, norm_type))
    assert zerograph.norms(_model(), "inf").p == math.inf


@pytest.mark.parametrize("clip", [torch.tensor(0.5), np.float32(0.5)], ids=["tensor", "numpy"])
def test_a_norm_to_clip_to_is_any_number(clip: Any) -> None:
    param = nn.Parameter(torch.ones(1))
    param.grad = torch.full((1,), 3.0)
    zerograph.optim.SGD([param], lr=1.0).step(clip=clip)
    assert param.item() == pytest.approx(0.5)


def test_an_empty_generator_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    zerograph.clip_grad_norm_([], 1.0)
    assert not caplog.records
    zerograph.clip_grad_norm_((p for p in ()), 1.0)
    assert "no gradient is clipped" in caplog.text


def test_a_backend_that_is_not_called_and_arguments_without_names() -> None:
    model = _model()
    with pytest.raises(ConfigError, match=r"torch\.compile got zerograph\.backend as it is") as caught:
        torch.compile(model, backend=zerograph.backend)(torch.ones(1, 4))
    assert "zerograph.backend()" in caught.value.hint
    with pytest.raises(ConfigError, match=r"zerograph\.backend got \(3,\) without names") as caught:
        zerograph.backend(3)
    assert "stage=3" in caught.value.hint
    with pytest.raises(ConfigError, match="options must be arguments by name"):
        torch.compile(model, backend="zerograph", options={3: 3})(torch.ones(1, 4))
