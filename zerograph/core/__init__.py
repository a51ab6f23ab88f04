"""Plain data that every floor reads: steps, plans, programs, machines, configurations, errors and files.

Everyone may import it. It imports nothing of ZeroGraph and never torch, so that the command line starts in a moment.
Begin with :mod:`~zerograph.core.step` (what a training step does), :mod:`~zerograph.core.plan` (what is decided about
it) and :mod:`~zerograph.core.program` (what then runs, :mod:`~zerograph.core.instructions`).
"""
