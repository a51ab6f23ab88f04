"""A model and its parameters: sharded in place, read in full inside of a forward, saved and loaded.

``optim``, ``api`` and the floors above import it; it imports ``graph``, ``core``, the runtime, and how ranks agree
from the compiler. Begin with :mod:`~zerograph.sharding.adoption`, the first call of a model, and
:mod:`~zerograph.sharding.module_classes`, the modules that it leaves behind.
"""
