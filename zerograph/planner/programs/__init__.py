"""Programs of a step under a plan, before anything is lowered: costs, buckets, coarse programs and their forecasts."""
