"""Programs over time: simulated, and proven. One accounting of seconds and bytes, for coarse programs and for what
runs."""
