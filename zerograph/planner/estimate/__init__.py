"""What a model takes that is given by its sizes alone: one row per ZeRO stage and offload choice."""
