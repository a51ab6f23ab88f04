"""Where a step may be cut along one of its dimensions (rows of a weight, tokens, samples of the batch).

Passes write the parts, and the compiler asks what can be cut before there is a plan. Begin with
:mod:`~zerograph.tiling.cuts`, which says how operators treat a dimension.
"""
