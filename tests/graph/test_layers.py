"""Where repeated layers begin."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import Builder, plan, show
from torch import fx

from zerograph.graph import layers
from zerograph.graph.layers import layer_of_node, layer_starts, module_of, name_model
from zerograph.passes import gather

aten = torch.ops.aten
LONG, SHORT = 20, 5


def _graph(*modules: tuple[str | None, int], key: str = "nn_module_stack") -> fx.Graph:
    """A chain of operations, so many for each module."""
    b = Builder()
    node = b.input("x", 4)
    for path, count in modules:
        for _ in range(count):
            node = b.call(aten.sin.default, node)
            if path is not None:
                node.meta[key] = {"module": (path, object)}
    return b.output(node).graph


def _starts(graph: fx.Graph) -> list[int]:
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    return [nodes.index(n) for n in layer_starts(graph)]


def test_golden_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts of a gathered graph: none at a gather or a free, which move to what they are for."""
    monkeypatch.setattr(layers, "_LEAST", 2)
    b = Builder()
    x = b.input("x", 4, 4)
    embed, up, down, head = b.params("embed", "up", "down", "head")
    for module, weight in (("embed", embed), ("h.0", up), ("h.1", down), ("head", head)):
        b.module = f"L['self'].{module}"
        x = b.call(aten.relu.default, b.mm(x, weight))
    gm = b.output(x)
    gather(gm, plan(gm, "embed", "up", "down", "head"))
    starts = {node.name for node in layer_starts(gm.graph)}
    lines = show(gm).split("\n")
    assert_expected_inline(
        "\n".join(f"--- {line}" if line.split(" =")[0] in starts else line for line in lines),
        """\
gather_default = gather([embed_shard], 0)
wait_gather_default = wait_gather(gather_default, [embed_shard], 0)
getitem = getitem(wait_gather_default, 0)
mm_default = mm(x, getitem)
relu_default = relu(mm_default)
free_default = free([getitem], 0)
gather_default_1 = gather([up_shard], 1)
wait_gather_default_1 = wait_gather(gather_default_1, [up_shard], 1)
getitem_1 = getitem(wait_gather_default_1, 0)
--- mm_default_1 = mm(relu_default, getitem_1)
relu_default_1 = relu(mm_default_1)
free_default_1 = free([getitem_1], 1)
gather_default_2 = gather([down_shard], 2)
wait_gather_default_2 = wait_gather(gather_default_2, [down_shard], 2)
getitem_2 = getitem(wait_gather_default_2, 0)
--- mm_default_2 = mm(relu_default_1, getitem_2)
relu_default_2 = relu(mm_default_2)
free_default_2 = free([getitem_2], 2)
gather_default_3 = gather([head_shard], 3)
wait_gather_default_3 = wait_gather(gather_default_3, [head_shard], 3)
getitem_3 = getitem(wait_gather_default_3, 0)
--- mm_default_3 = mm(relu_default_2, getitem_3)
relu_default_3 = relu(mm_default_3)
free_default_3 = free([getitem_3], 3)
return [relu_default_3]""",
    )


def test_layers_begin_with_their_first_operation_and_the_rest_after_the_last() -> None:
    graph = _graph(("self.embed", 3), ("self.h.0.norm", LONG), ("self.h.1", LONG), ("self.head", 2))
    assert _starts(graph) == [3, 3 + LONG, 3 + 2 * LONG]


def test_a_backward_is_read_by_the_modules_of_its_forward() -> None:
    graph = _graph(("self.h.1", LONG), ("self.h.0", LONG), key="fwd_nn_module_stack")
    assert _starts(graph) == [0, LONG]


def test_short_layers_begin_together() -> None:
    assert _starts(_graph(*((f"self.{i}", SHORT) for i in range(8)))) == [0, 20]


def test_what_has_no_module_belongs_to_the_layer_before() -> None:
    graph = _graph((None, 2), ("self.h.0", LONG), (None, 3), ("self.h.1", LONG), (None, 4))
    assert _starts(graph) == [2, 2 + LONG + 3]


def test_a_layer_that_is_visited_again_begins_once() -> None:
    graph = _graph(("self.h.0", LONG), ("self.h.1", LONG), ("self.h.0", LONG), ("self.h.1", LONG))
    assert _starts(graph) == [0, LONG]


def test_a_model_without_layers_is_not_cut() -> None:
    assert _starts(_graph(("self.up", LONG), ("self.down", LONG))) == []


def test_the_outermost_number_names_the_layer() -> None:
    node = next(iter(_graph(("L['self'].h.3.experts.7.up", 1)).find_nodes(op="call_function", target=aten.sin.default)))
    assert layer_of_node(node) == "h.3"


def test_modules_of_the_compiled_model_have_the_names_of_its_parameters() -> None:
    paths = {"L['self'].h.3.up": "h.3.up", "L['self']": "", "L['model'].h.3": "L['model'].h.3"}
    for path, module in paths.items():
        (node,) = _graph((path, 1)).find_nodes(op="call_function", target=aten.sin.default)
        assert module_of(node) == module


def _named(*paths: str) -> fx.GraphModule:
    """A graph with an operation in each of these modules."""
    return fx.GraphModule(torch.nn.Module(), _graph(*((path, 1) for path in paths)))


def _modules(gm: fx.GraphModule) -> list[str | None]:
    return [module_of(n) for n in gm.graph.find_nodes(op="call_function", target=aten.sin.default)]


@pytest.mark.parametrize("root", ["L['this']", "L['model']", "G['model']", "L['args'][0]"])
def test_the_model_may_be_in_any_variable(root: str) -> None:
    gm = _named(f"{root}.embed", f"{root}.h.0.up", root)
    assert name_model(gm) == 3
    assert _modules(gm) == ["embed", "h.0.up", ""]
    assert name_model(gm) == 0


@pytest.mark.parametrize(
    "paths",
    [
        ("L['self'].h.0", "L['self'].h.1"),
        ("L['student'].h.0", "L['teacher'].h.0"),  # both would be h.0
        ("L['self'].h.0", "L['other'].h.0"),
        ("L['models'][0].h.0", "L['models'][1].h.0"),
    ],
)
def test_names_that_are_right_or_would_meet_stay(paths: tuple[str, ...]) -> None:
    gm = _named(*paths)
    before = _modules(gm)
    assert name_model(gm) == 0
    assert _modules(gm) == before
