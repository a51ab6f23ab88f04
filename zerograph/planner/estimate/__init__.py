"""What a model takes that is told by its sizes alone: one row per ZeRO stage and offload choice."""
