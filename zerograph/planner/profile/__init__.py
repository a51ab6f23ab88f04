"""The step that is planned: its values and their lives, its regions, and what of it can run in tiles."""
