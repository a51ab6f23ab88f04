"""Programs over time: simulated, and proven. One accounting of seconds and bytes, for sketches and for what runs."""
