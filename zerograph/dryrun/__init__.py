"""Models compiled without being run or held, for any number of simulated ranks: ``zerograph plan`` and its questions.

Only the command line imports it; it may use every other room. Begin with :mod:`~zerograph.dryrun.forecast`, from a
model to a plan file, and :mod:`~zerograph.dryrun.compile_only`, which compiles for it.
"""
