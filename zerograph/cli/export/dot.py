"""The graph of tasks: DOT for Graphviz, GraphML for yEd, Gephi and networkx.

An edge is a wait: ``"data"`` where a task needs another's result or its memory, ``"order"`` where it only follows the
previous task of its stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import networkx as nx

from zerograph.cli.export.labels import STREAM_COLOURS, picture_seconds
from zerograph.core.files.planfile import PlanFile
from zerograph.core.files.runfile import Beside
from zerograph.core.timeline import Forecast, Stream


def write_dot(file: PlanFile, path: Path, beside: Beside | None = None) -> None:
    """Write the graph for Graphviz: a row per stream, the critical path in bold, measured times if there are any.

    Raises:
        OSError: ``path`` cannot be written.
    """
    graph = task_graph(file.forecast, beside)
    lines = ["digraph plan {", f"  label={_quoted(file.model)};", "  rankdir=LR; labelloc=t;"]
    lines += ['  fontname="sans-serif"; node [shape=box style="filled,rounded" fontname="sans-serif" fontcolor=white];']
    lines += [f"  {task} [{_attributes(_node_style(data))}];" for task, data in graph.nodes(data=True)]
    lines += [f"  {a} -> {b} [{_attributes(_edge_style(data))}];" for a, b, data in graph.edges(data=True)]
    path.write_text("\n".join([*lines, "}"]) + "\n", encoding="utf-8")


def write_graphml(file: PlanFile, path: Path, beside: Beside | None = None) -> None:
    """Write the graph as GraphML, with everything known about a task as attributes of its node.

    Raises:
        OSError: ``path`` cannot be written.
    """
    nx.write_graphml(task_graph(file.forecast, beside), str(path))


def task_graph(forecast: Forecast, beside: Beside | None = None) -> nx.DiGraph:
    """A node per task, an edge to each task from every one it waits for.

    With a run, nodes have ``measured`` seconds: those that the run spent in the task, where it had it.
    """
    critical = set(forecast.critical_path)
    graph = nx.DiGraph()
    last: dict[Stream, int] = {}
    for span in forecast.spans:
        graph.add_node(
            span.task,
            name=span.name,
            stream=span.stream,
            start=span.start,
            seconds=span.end - span.start,
            module=span.module,
            source=span.source,
            critical=span.task in critical,
        )
        if beside is not None and span.task in beside.spans:
            graph.nodes[span.task]["measured"] = sum(s.end - s.start for s in beside.spans[span.task])
        if span.stream in last:
            graph.add_edge(last[span.stream], span.task, kind="order")
        graph.add_edges_from(((before, span.task) for before in span.after), kind="data")
        last[span.stream] = span.task
    return graph


def _node_style(data: Mapping[str, Any]) -> dict[str, str]:
    colour = STREAM_COLOURS[data["stream"]].light
    measured = f" ({picture_seconds(data['measured'])} measured)" if "measured" in data else ""
    style = {
        "label": f"{data['name']}\n{picture_seconds(data['seconds'])}{measured}",
        "tooltip": f"{data['stream']} {data['module']} {data['source']}".strip(),
        "group": data["stream"],
        "fillcolor": colour,
    }
    return {**style, "color": "black", "penwidth": "3"} if data["critical"] else {**style, "color": colour}


def _edge_style(data: Mapping[str, Any]) -> dict[str, str]:
    return {"style": "dotted", "arrowhead": "none"} if data["kind"] == "order" else {"style": "solid"}


def _attributes(values: Mapping[str, str]) -> str:
    return " ".join(f"{name}={_quoted(value)}" for name, value in values.items())


def _quoted(text: str) -> str:
    # In DOT a backslash starts an escape such as \N, which stands for the node's name.
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
