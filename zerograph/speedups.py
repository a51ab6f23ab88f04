"""What torch does more slowly than it must while it traces deep models. Results are the same without any of this."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from networkx.algorithms.flow import boykov_kolmogorov, maxflow
from torch._functorch._aot_autograd import graph_compile  # private: it writes graphs, listened to or not
from torch._logging._internal import trace_log


@contextmanager
def fast_minimum_cut() -> Iterator[None]:
    """Let the partitioner cut by augmenting paths, several times faster on graphs of deep models.

    The cut does not depend on it: networkx takes all nodes from which the sink can be reached once a flow is maximal,
    which are the same for every maximal flow, and the partitioner's capacities are whole numbers.
    """
    before = maxflow.default_flow_func
    maxflow.default_flow_func = boykov_kolmogorov
    try:
        yield
    finally:
        maxflow.default_flow_func = before


@contextmanager
def graphs_written_for_readers() -> Iterator[None]:
    """Let AOTAutograd write its graphs as text only where a log or a trace wants them: writing takes a twentieth.

    (It wants the texts for its cache too, which takes in nothing but what Inductor compiles whole.)
    """
    logs = (graph_compile.aot_joint_log, graph_compile.aot_graphs_log)
    if trace_log.handlers or any(log.isEnabledFor(logging.INFO) for log in logs):
        yield
        return
    with (
        patch.object(graph_compile, "_log_joint_graph", lambda *_: None),
        patch.object(graph_compile, "_log_fw_bw_graphs", lambda *_: (None, None)),
    ):
        yield
