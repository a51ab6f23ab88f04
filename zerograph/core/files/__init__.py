"""The files that people keep: plans, runs, and how they are read, written and compared."""
