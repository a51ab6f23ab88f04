"""Simulated hardware, by which a CPU runs the programs of an accelerator. Begin in ``simulated_host.py``."""
