"""Shared tools to read FX graphs: the ``zg::`` operators, facts about nodes, layers, costs and sizes.

Passes, the compiler and the dry runs import it; it imports ``core`` and torch. The runtime and the sharded modules use
its operators and nothing else of it. Begin with :mod:`~zerograph.graph.ops`, the operators, and
:mod:`~zerograph.graph.nodes`, the facts that passes leave on nodes.
"""
