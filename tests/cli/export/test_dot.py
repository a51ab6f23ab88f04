"""The graph of tasks, read back by networkx and pydot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import networkx as nx
import pydot
import pytest
from plans import beside, plan_file

from zerograph.cli.export import dot
from zerograph.core.files.planfile import PlanFile


def waits(file: PlanFile) -> set[tuple[str, str]]:
    return {(str(before), str(span.task)) for span in file.forecast.spans for before in span.after}


@pytest.mark.parametrize("layers", [1, 12])
def test_graphml_has_every_task_and_every_wait(tmp_path: Path, layers: int) -> None:
    file = plan_file(layers, offload=True)
    dot.write_graphml(file, tmp_path / "plan.graphml")
    graph = nx.read_graphml(tmp_path / "plan.graphml")
    assert nx.is_directed_acyclic_graph(graph)
    assert waits(file) <= set(graph.edges)
    for span in file.forecast.spans:
        node = graph.nodes[str(span.task)]
        assert (node["name"], node["stream"], node["source"]) == (span.name, span.stream, span.source)
        assert node["seconds"] == span.end - span.start
        assert node["critical"] == (span.task in file.forecast.critical_path)
    path = [str(task) for task in file.forecast.critical_path]
    assert nx.is_path(graph, path), "each task of the critical path waits for the one before"


def test_dot_has_every_task_and_every_wait(tmp_path: Path) -> None:
    file = plan_file(4)
    dot.write_dot(file, tmp_path / "plan.dot")
    (graph,) = pydot.graph_from_dot_file(str(tmp_path / "plan.dot"))
    edges = {(e.get_source(), e.get_destination()) for e in graph.get_edges()}
    assert waits(file) <= edges
    assert edges == {(str(a), str(b)) for a, b in dot.task_graph(file.forecast).edges}
    labels = {n.get_name(): n.get("label") for n in graph.get_nodes()}
    assert labels["1"] == '"forward blocks.0\\n5 ms"'


def test_names_are_quoted(tmp_path: Path) -> None:
    file = plan_file(1)
    spans = tuple(replace(span, name='a "b" \\N; }') for span in file.forecast.spans)
    file = replace(file, model='"]; x -> y', forecast=replace(file.forecast, spans=spans))
    dot.write_dot(file, tmp_path / "plan.dot")
    (graph,) = pydot.graph_from_dot_file(str(tmp_path / "plan.dot"))
    assert len([n for n in graph.get_nodes() if n.get_name().isdigit()]) == len(spans)
    dot.write_graphml(file, tmp_path / "plan.graphml")
    assert nx.read_graphml(tmp_path / "plan.graphml").nodes["0"]["name"] == 'a "b" \\N; }'


def test_nodes_have_measured_seconds(tmp_path: Path) -> None:
    file = plan_file(4, update=True)
    dot.write_graphml(file, tmp_path / "plan.graphml", beside(file, 3.0))
    graph = nx.read_graphml(tmp_path / "plan.graphml")
    for span in file.forecast.spans:
        assert graph.nodes[str(span.task)]["measured"] == pytest.approx(3 * (span.end - span.start))
    dot.write_dot(file, tmp_path / "plan.dot", beside(file, 3.0))
    (drawn,) = pydot.graph_from_dot_file(str(tmp_path / "plan.dot"))
    labels = {n.get_name(): n.get("label") for n in drawn.get_nodes()}
    assert labels["1"] == '"forward blocks.0\\n5 ms (15 ms measured)"'
