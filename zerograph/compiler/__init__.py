"""From a frame that Dynamo traced to the programs that run it.

``sharding`` and the floors above import it; it imports the passes, the planner, the runtime and what is below them.
Begin with :mod:`~zerograph.compiler.driver`, which names every step in order: capture, plan, rewrite, lower.
"""
