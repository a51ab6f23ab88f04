"""A Hugging Face config.json as MODEL: estimated and planned without weights, and refused with a reason."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from zerograph.cli import main
from zerograph.core.files.planfile import PlanFile

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 512,
}


def written(path: Path, data: Any) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    pytest.importorskip("transformers", reason="the optional extra transformers is not installed")
    return written(tmp_path / "config.json", LLAMA)


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the optional extra transformers is not installed")
    sizes = {"hidden_size": 16, "num_heads": 4, "head_dim": 8, "n_groups": 1, "num_hidden_layers": 1, "vocab_size": 64}
    transformers.Mamba2Config(**sizes, time_step_limit=(0.0, math.inf)).save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    result = run("estimate", tmp_path / "config.json", "--world", "8")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("tied", [False, True])
def test_sizes_are_read_from_the_model_that_a_config_describes(config: Path, tied: bool) -> None:
    written(config, {**LLAMA, "tie_word_embeddings": tied})
    data = json.loads(run("estimate", config, "--world", "8", "--json").stdout)
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 192 * 64 + 2 * 64
    parameters = 3 * layer + 64 + (1 if tied else 2) * 512 * 64
    assert data["size"] == {"parameters": parameters, "layers": 3, "hidden": 64, "vocab": 512, "heads": 4}


def test_a_config_of_70_billion_parameters_allocates_nothing(config: Path) -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    written(config, {**LLAMA, **sizes, "num_hidden_layers": 80, "vocab_size": 128256})
    result = run("estimate", config, "--world", "64")
    assert result.exit_code == 0
    assert "70.6B parameters, 80 layers, hidden 8192, 64 heads, vocabulary 128256" in result.stderr


def test_a_step_with_its_loss_is_planned(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = run("plan", config, "--world", "4", "--batch", "2", "--seq", "32", "-o", out)
    assert result.exit_code == 0, result.stderr
    file = PlanFile.from_json(out.read_text())
    params = [p for bucket in file.plan.buckets for p in bucket.params]
    assert "model.layers.2.mlp.down_proj.weight" in {p.name for p in params}
    assert {p.dtype for p in params} == {"float32"}  # master copies, though the config says bfloat16
    assert file.tokens == 64 and any(span.module == "model.layers.1" for span in file.forecast.spans)


@pytest.mark.parametrize("command", ["estimate", "plan"])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "config.json: this is no JSON"),
        ([], "config.json: there is no model_type"),
        ({"hidden_size": 64}, "config.json: there is no model_type"),
        ({"model_type": "abacus"}, "knows no model_type 'abacus'"),
        ({"model_type": "vit"}, "no causal language model of model_type 'vit'"),
        ({**LLAMA, "hidden_size": "wide"}, "config.json makes no model"),
        ({**LLAMA, "num_attention_heads": 0}, "makes no model: ZeroDivisionError"),
    ],
)
def test_a_config_that_makes_no_model(config: Path, command: str, data: Any, message: str) -> None:
    result = run(command, written(config, data))
    assert result.exit_code == 2 and not result.stdout
    assert message in result.stderr and "hint: " in result.stderr


def test_no_such_file(tmp_path: Path) -> None:
    result = run("plan", tmp_path / "absent.json")
    assert result.exit_code == 2 and "absent.json: No such file" in result.stderr


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # what makes Python's own import fail
    result = run("estimate", written(tmp_path / "config.json", LLAMA))
    assert result.exit_code == 2
    assert "which cannot be imported" in result.stderr and "hint: pip install '.[hf]' in the clone" in result.stderr
