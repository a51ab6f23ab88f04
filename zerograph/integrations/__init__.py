"""ZeroGraph inside other libraries' training loops, a module each; importing one imports that library only.

``accelerate``: an ``Accelerator``; ``transformers``: a ``Trainer``; ``lightning``: strategies of Fabric and of Trainer.
"""
