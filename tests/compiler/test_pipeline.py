"""The list of rewrites is complete, and its order is that in which a frame goes through them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import torch
import toy
from graphs import fake_world

import zerograph
from zerograph import passes
from zerograph.compiler.pipeline import REWRITES

_EDIT = re.compile(
    r"\.(?:erase_node|replace_all_uses_with|replace_input_with|node_copy|create_node|update_arg|recompile)\("
    r"|\.(?:args|kwargs|target) = "
)
_OF_OTHERS = {
    "repetition/repeat.py",  # what `few_layers` makes its graph with
    "lowering/segment_graph.py",  # nodes of a segment, copied as they are
}


def test_each_is_listed_once_and_says_what_it_does() -> None:
    assert len({step.name for step in REWRITES}) == len(REWRITES)
    assert all(step.does.endswith(".") for step in REWRITES)


def test_every_pass_is_listed() -> None:
    files = {path.stem for path in Path(passes.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == {step.name for step in REWRITES if step.run.__module__.startswith("zerograph.passes.")}
    assert files == {step.name for step in passes.PIPELINE}


def test_nothing_else_of_the_compiler_edits_graphs() -> None:
    room = Path(zerograph.__file__).parent / "compiler"
    edit = {str(path.relative_to(room)) for path in room.rglob("*.py") if _EDIT.search(path.read_text())}
    listed = {sys.modules[step.run.__module__].__file__ for step in REWRITES}
    assert {name for name in edit if str(room / name) not in listed} == _OF_OTHERS


def test_a_frame_goes_through_them_in_order() -> None:
    known, ran = {step.run.__code__: step.name for step in REWRITES}, list[str]()

    def calls(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in known:
            ran.append(known[frame.f_code])

    torch._dynamo.reset()
    with fake_world(rank=0, world_size=2):
        model = toy.Toy().train()
        toy.compiled(model, loss_only=True)
        sys.setprofile(calls)
        try:
            model(torch.arange(4)).sum().backward()
        finally:
            sys.setprofile(None)
    # The backward goes last through those of a program.
    last = sorted(set(ran), key=lambda name: len(ran) - 1 - ran[::-1].index(name))
    assert last == [step.name for step in REWRITES if step.name in last]
    assert {step.name for step in REWRITES} - set(last) <= {"few_layers"}
