"""The partitioner's minimum cut: found by another algorithm than networkx takes by itself, and the same."""

from __future__ import annotations

import math
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networkx.algorithms.flow import preflow_push
from torch import nn

import zerograph
from zerograph import speedups

EDGES = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 7), st.sampled_from([1, 1, 2, 3, 5, math.inf])), min_size=1, max_size=30
)


@given(EDGES)
def test_the_cut_is_that_of_any_maximal_flow(edges: list[tuple[int, int, float]]) -> None:
    graph = nx.DiGraph()
    graph.add_nodes_from([0, 7])
    graph.add_weighted_edges_from([edge for edge in edges if edge[0] < edge[1]], "capacity")
    ours, theirs = (_cut(graph, algorithm) for algorithm in (speedups.boykov_kolmogorov, preflow_push))
    assert ours == theirs


def _cut(graph: nx.DiGraph, algorithm: Any) -> Any:
    try:
        return nx.minimum_cut(graph, 0, 7, flow_func=algorithm)
    except nx.NetworkXUnbounded:
        return "unbounded"


class Model(nn.Sequential):
    """Torch runs compiled modules of its own classes eagerly."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_the_partitioner_cuts_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return chosen(*args, **kwargs)

    chosen = speedups.boykov_kolmogorov
    monkeypatch.setattr(speedups, "boykov_kolmogorov", counted)
    model = Model()
    model.compile(backend=zerograph.backend(compute="eager"))
    model(torch.randn(2, 4)).sum().backward()
    assert len(calls) == 1
    assert nx.algorithms.flow.maxflow.default_flow_func is preflow_push
