"""What the benchmarks share."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize(
    ("asked", "device", "gpus", "world"),
    [(None, "cpu", 0, 2), (3, "cpu", 0, 3), (None, "cuda", 1, 1), (4, "cuda", 8, 4)],
)
def test_cuda_has_no_more_ranks_than_gpus(
    asked: int | None, device: str, gpus: int, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    processes = importlib.import_module("facts").processes
    parser = argparse.ArgumentParser()
    assert processes(parser, asked, device) == world
    with pytest.raises(SystemExit):
        processes(parser, gpus + 1, "cuda")


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script of published runs."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("published")


def test_every_published_run_says_what_ran_and_what_came(published: ModuleType) -> None:
    for run in published.RUNS:
        assert run.source in published.SOURCES and run.model in published.MODELS and run.machine in published.MACHINES
        assert min(run.world, run.replicas, run.batch, run.accumulate) >= 1, run
        assert run.figure > 0 or run.gib > 0, run
        assert bool(run.gib) == bool(run.memory), run
    assert len(set(published.RUNS)) == len(published.RUNS)
    assert all(left.source in published.SOURCES and left.rows and left.why for left in published.LEFT)
    rows = {source: sum(run.source == source for run in published.RUNS) for source in published.SOURCES}
    asked = {"llm-foundry": 46, "torchtitan": 10, "Megatron": 6, "fms-fsdp": 8, "litgpt": 9, "thunder": 1}
    assert rows == {source: asked.get(source, 0) for source in published.SOURCES}


def test_models_have_as_many_parameters_as_is_published(published: ModuleType) -> None:
    """Of llm-foundry's in all, of litgpt's those that LoRA trains, of Megatron's in billions."""
    sizes = {
        "mpt-70b": 64_862_437_376, "mpt-30b": 29_975_214_080, "mpt-13b": 12_853_954_560, "mpt-7b": 6_658_859_008,
        "mpt-3b": 2_651_837_440, "mpt-1b": 1_315_950_592, "llama-2-7b, LoRA": 4_194_304,
        "llama-2-13b, LoRA": 6_553_600, "phi-1.5, LoRA": 1_572_864,
    }  # fmt: skip
    run = published.RUNS[0]
    for name, size in sizes.items():
        with torch.device("meta"):
            model, _ = published.MODELS[name].make(run)
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == size, name
    assert published.megatron_flops(published.MODELS["gpt-175b"], run) > 0


def test_a_run_is_forecast_and_other_ranks_and_lengths_beside_it(
    published: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(published.MODELS, "small", published.Model(2, 64, 2, 128))
    run = published.Run("llm-foundry", "small", "H100", 8, 2, 32, "full", 1000.0)
    runs = run, replace(run, world=64), replace(run, batch=1, seq=64)
    monkeypatch.setattr(published, "RUNS", runs)
    monkeypatch.setattr(published, "OUT_OF_MEMORY", ())
    rows = [published.row(one) for one in runs]
    assert all(row.found > 0 and row.seconds == pytest.approx(1000 / row.found) for row in rows)
    assert rows[1].found < rows[0].found, "64 ranks exchange over slower links"
    changes = dict(published.slopes(rows))
    assert changes == {
        "small, 2 x 32, full on H100, 8 to 64 GPUs": rows[1].seconds / rows[0].seconds,
        "small, 2 x 32, full on H100, 32 to 64 tokens": rows[2].seconds / rows[0].seconds,
    }
    longer = published.row(replace(run, accumulate=4))
    assert longer.found > rows[0].found, "one update for four micro-batches"
    assert next(published.summary(rows)).startswith("seconds within 20%")


def test_updates_of_deepspeed_need_no_model(published: ModuleType) -> None:
    found = list(published.deepspeed_rows())
    assert [row.unit for row in found] == ["s"] * 10 + ["TFLOP/s"] * 2
    assert all(row.found > 0 for row in found)
