"""Layers that are alike are compiled once."""
