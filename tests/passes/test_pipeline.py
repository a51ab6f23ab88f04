"""The list of passes is the order in which they run; each has a file and a test of its name.

Tests ``compiler/driver.py``, ``compiler/compilation.py`` and ``compiler/frame.py``.
"""

from __future__ import annotations

from pathlib import Path

import torch
import toy
from graphs import fake_world

from zerograph.passes import PIPELINE

TESTS = Path(__file__).parent


def test_each_pass_is_the_one_function_of_its_file_and_has_a_test() -> None:
    names = [step.name for step in PIPELINE]
    assert len(set(names)) == len(names)
    for step in PIPELINE:
        assert step.run.__module__ == f"zerograph.passes.{step.name}"
        assert (TESTS / f"test_{step.name}.py").exists()


def ran(*stages: str) -> list[str]:
    return [step.name for step in PIPELINE if step.stage in stages]


def test_frames_go_through_the_list() -> None:
    torch._dynamo.reset()
    with fake_world(rank=0, world_size=2):
        model = toy.Toy().train()
        backend = toy.compiled(model)
        model(torch.arange(4)).sum().backward()
        with torch.no_grad():
            model(torch.arange(4))
    training, evaluation = backend.frames
    assert [(p.graph, p.name) for p in training.passes] == [
        *(("joint", name) for name in ran("traced", "planned", "joint")),
        *(("forward", name) for name in ran("pair", "forward", "graph")),
        *(("backward", name) for name in ran("graph", "backward")),
    ]
    assert [p.name for p in evaluation.passes] == ran("traced", "planned", "graph")
    assert all(not p.diff for frame in backend.frames for p in frame.passes)  # nobody reads texts of a training run
