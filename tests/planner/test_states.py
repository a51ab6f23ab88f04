"""Bytes by formula, against published tables: ZeRO, ZeRO-Infinity, and Korthikanti et al. on activations.

Tests ``planner/estimate/strategy.py``, ``planner/estimate/sizes.py`` and ``planner/estimate/training.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner.formulas import (
    Layout,
    checkpoint_bytes,
    layer_bytes,
    layout_of,
    model_states,
    total,
    working,
)

from zerograph.core.errors import ConfigError
from zerograph.planner.estimate.sizes import ModelSize, format_count, parse_count
from zerograph.planner.estimate.strategy import STAGES, Strategy
from zerograph.planner.estimate.training import Training

GB, TB, GIB, TIB = 10**9, 10**12, 2**30, 2**40
MIXED = Training(dtype="float16", optimizer="mixed", attention="whole")

# The rows of figure 2a of ZeRO-Infinity: layers, hidden, heads; model states in TiB at 20 bytes per parameter, working
# memory of the model states and of the activations in GiB, the latter for 4 sequences of 1024.
INFINITY = [
    (100, 20 * 1024, 160, 9.16, 6.25, 2.50),
    (128, 25 * 1024, 256, 18.31, 9.77, 3.56),
    (195, 64 * 1024, 512, 182.81, 64.00, 8.00),
    (315, 160 * 1024, 1024, 1845.70, 400.00, 18.00),
]


def sized(parameters: float) -> ModelSize:
    return ModelSize.of(int(parameters))


def device_states(size: ModelSize, training: Training, stage: int, world: int) -> int:
    return total(model_states(size, layout_of(training), Strategy(stage), world), "device")


@pytest.mark.parametrize(
    ("model", "parameters", "states"),
    [("BERT-Large", 0.32e9, 5.1e9), ("GPT-2", 1.5e9, 24e9), ("Turing-NLG", 17.2e9, 275e9), ("GPT-3", 175e9, 2.8e12)],
)
@pytest.mark.parametrize("training", [MIXED, Training(dtype="float32", optimizer="fp32")])
def test_adam_takes_16_bytes_per_parameter(model: str, parameters: float, states: float, training: Training) -> None:
    found = device_states(sized(parameters), training, stage=0, world=1)
    assert found == 16 * int(parameters)
    assert found == pytest.approx(states, rel=0.005)


@pytest.mark.parametrize(("layers", "hidden", "heads", "states", "working_states", "working_activations"), INFINITY)
def test_working_memory_is_that_of_zero_infinity(
    layers: int, hidden: int, heads: int, states: float, working_states: float, working_activations: float
) -> None:
    size = ModelSize.of(layers=layers, hidden=hidden, heads=heads, vocab=1)
    with_fp32_gradients = Layout(copy=2, gradient=2, master=4 + 4, moments=8, resident=True)
    assert total(model_states(size, with_fp32_gradients, Strategy(0), 1), "device") / TIB == pytest.approx(
        states, 0.002
    )
    alone = replace(MIXED, prefetch=0, bucket_size=1)
    assert total(working(size, alone, Strategy(3)), "device") == 4 * hidden * 4 * hidden
    assert round(4 * hidden * 4 * hidden / GIB, 2) == working_states
    theirs = 4 * 1024 * (16 * hidden + 2 * heads * 1024)  # section 3: b * s * ci * (16 * hd + 2 * heads * s)
    assert round(theirs / GIB, 2) == pytest.approx(working_activations)
    ours = layer_bytes(size, replace(MIXED, batch=4))
    assert 1.9 < ours / theirs < 2.5  # all that a layer saves, of which they count products and scores


def test_checkpoints_of_a_trillion_parameters_are_those_of_zero_infinity() -> None:
    size = ModelSize.of(layers=128, hidden=25 * 1024, vocab=1)
    assert round(128 * checkpoint_bytes(size, replace(MIXED, batch=32)) / TIB, 2) == 0.20


@pytest.mark.parametrize(
    ("hidden", "heads", "scores", "share"), [(12288, 96, 80, 0.70), (20480, 128, 64, 0.65)], ids=["GPT-3", "MT-NLG"]
)
def test_activations_of_a_layer_are_those_of_megatron(hidden: int, heads: int, scores: int, share: float) -> None:
    size = ModelSize.of(layers=1, hidden=hidden, heads=heads)
    training = replace(MIXED, batch=3, seq=2048)
    fused = layer_bytes(size, replace(training, attention="fused"))
    whole = layer_bytes(size, training)
    assert fused == 3 * 2048 * hidden * 34
    assert whole == 3 * 2048 * hidden * (34 + scores)  # 5*a*s/h is 80 for GPT-3, 64 for MT-NLG
    assert round(1 - fused / whole, 2) == share  # what recomputing attention alone saves


def test_the_zerograph_layout_gathers_a_copy_and_keeps_a_master() -> None:
    size, training = sized(1e9), Training(dtype="bfloat16")
    assert [device_states(size, training, stage, 4) / GB for stage in STAGES] == [18, 9, 6, 4]
    plain = Training(dtype="float32")
    assert [device_states(size, plain, stage, 4) / GB for stage in STAGES] == [16, 11, 8, 4]
    assert [device_states(size, plain, stage, 1) / GB for stage in STAGES] == [16] * 4  # kernels read the master
    assert [device_states(size, training, stage, 1) / GB for stage in STAGES] == [18] * 4  # or a cast of it


@pytest.mark.parametrize(
    "bad", [(0, "optimizer", "host"), (1, "gradients", "host"), (2, "parameters", "nvme"), (3, "none", "host")]
)
def test_a_choice_that_cannot_be_is_refused(bad: tuple[int, str, str]) -> None:
    with pytest.raises(ConfigError, match="offload"):
        Strategy(*bad)  # type: ignore[arg-type]


def test_sizes_that_are_missing_follow_from_the_others() -> None:
    gpt3 = ModelSize.of(175 * GB)
    assert (gpt3.layers, gpt3.hidden, gpt3.heads) == (96, 12288, 96)
    llama = ModelSize.of(layers=80, hidden=8192, vocab=128_000)
    assert llama.parameters == 12 * 80 * 8192**2 + 128_000 * 8192
    assert ModelSize.of(llama.parameters, layers=80, vocab=128_000) == llama
    assert ModelSize.of(llama.parameters, hidden=8192, vocab=128_000) == llama
    with pytest.raises(ConfigError, match="open"):
        ModelSize.of(hidden=8192)
    with pytest.raises(ConfigError, match="layers"):
        ModelSize.of(layers=0, hidden=8)


@pytest.mark.parametrize(
    ("text", "count"), [("70B", 70 * GB), ("1.5T", 1500 * GB), ("128k", 128_000), ("7", 7), ("350 M", 350_000_000)]
)
def test_counts_are_read_and_written(text: str, count: int) -> None:
    assert parse_count(text) == count
    assert parse_count(format_count(count)) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "70X", "B", "1e9", "0.1"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="count"):
        parse_count(text)
