"""What a loss saves: values as large as the logits, or what these are computed from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zerograph.core.step import Op, Step, Value
from zerograph.planner.profile.liveness import Graph, Mode, saved


def loss_of(logits: int, module: str = "") -> Step:
    """A product makes logits of so many bytes; what the loss's backward reads, 1,000 bytes, is computed from them."""

    def op(name: str, phase: str, *reads: str, flops: int = 0, cheap: bool = True) -> Op:
        return Op(name, name, phase, reads, (name,), (), "", module, flops, 0, cheap)  # type: ignore[arg-type]

    ops = (
        op("logits", "forward", "x", flops=10, cheap=False),
        op("most", "forward", "logits", cheap=False),
        op("wide", "forward", "logits"),
        op("shifted", "forward", "wide", "most"),
        op("loss", "forward", "shifted", cheap=False),
        op("softmax", "backward", "shifted"),
        op("d_x", "backward", "softmax", "x", flops=20, cheap=False),
    )
    sizes = {
        "x": 100,
        "logits": logits,
        "most": 4,
        "wide": 1000,
        "shifted": 1000,
        "loss": 4,
        "softmax": 1000,
        "d_x": 100,
    }
    values = tuple(Value(name, size, "input" if name == "x" else "temporary") for name, size in sizes.items())
    return Step(ops, values, (), True, ("loss",))


def names(step: Step, mode: Mode) -> set[str]:
    return {step.values[i].name for i in saved(Graph(step), mode).until}


@pytest.mark.parametrize("mode", ["auto", "full"])
@pytest.mark.parametrize(
    ("logits", "returned", "to_save"),
    [
        (1000, False, {"shifted"}),
        (1000, True, {"logits", "most"}),  # the user holds them
        (500, False, {"logits", "most"}),  # in 16 bits
        (2000, True, {"logits", "most"}),
        (2000, False, {"shifted"}),
    ],
)
def test_a_loss_saves_what_takes_less(logits: int, returned: bool, to_save: set[str], mode: Mode) -> None:
    step = loss_of(logits)
    outputs = ("loss", "logits") if returned else ("loss",)
    assert names(replace(step, outputs=outputs), mode) == to_save


def test_what_runs_again_comes_before_its_reader() -> None:
    graph = Graph(replace(loss_of(1000), outputs=("loss", "logits")))
    (repeated,) = saved(graph, "auto").repeats.values()
    assert [graph.ops[i].name for i in repeated] == ["wide", "shifted"]


def test_where_all_is_saved_that_is() -> None:
    assert names(replace(loss_of(500), outputs=("loss", "logits")), "none") == {"shifted"}


def test_layers_save_what_the_backward_reads() -> None:
    assert names(loss_of(500, "blocks.0"), "auto") == {"shifted"}


def test_a_step_has_one_graph_and_a_changed_step_another() -> None:
    step, same = loss_of(1000), loss_of(1000)
    graph = Graph.of(step)
    assert Graph.of(step) is graph and step == same and hash(step) == hash(same)
    other = replace(step, outputs=("loss", "logits"))
    assert Graph.of(other) is not graph and Graph.of(other).outputs != graph.outputs
