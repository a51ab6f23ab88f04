"""The planner: a step, a machine and a configuration in, a plan out. Pure Python; never imports torch.

The compiler, the dry runs and the command line import it; it imports ``core`` and ``sim`` alone. Its floors, from the
lowest up: ``profile`` (the step), ``programs`` (coarse ones of it), ``search``, ``estimate`` (tables from sizes alone),
and ``explain``. Begin with :mod:`~zerograph.planner.programs.rules`, a plan without a search, then
:mod:`~zerograph.planner.search.search`, the fastest plan within a budget.
"""
