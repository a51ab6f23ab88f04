"""The planner: one step as data in, a plan out. Pure Python; never imports torch."""

from zerograph.planner.replay import refuse_world_size, replay
from zerograph.planner.rules import plan_step

__all__ = ["plan_step", "refuse_world_size", "replay"]
