"""Graphs become segments, and segments and the nodes between them a program."""
