"""Programs of a step under a plan, before anything is lowered: costs, buckets, sketches and their forecasts."""
