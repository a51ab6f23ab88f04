"""The planner: a step, a machine and a configuration in, a plan out. Pure Python; never imports torch.

The compiler, the dry runs and the command line import it; it imports ``core`` alone. Begin with
:mod:`~zerograph.planner.rules`, a plan without a search, then :mod:`~zerograph.planner.search`, the fastest plan within
a budget.
"""

from zerograph.planner.replay import refuse_world_size, replay
from zerograph.planner.rules import plan_step

__all__ = ["plan_step", "refuse_world_size", "replay"]
