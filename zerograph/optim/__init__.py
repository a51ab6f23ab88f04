"""Optimizers of sharded parameters, and work on these between backward and step.

A step is one native call on the host; those of Muon, LAMB and OneBitAdam are torch's operators and messages between
ranks.
"""

from zerograph.optim.algorithms.adagrad import Adagrad
from zerograph.optim.algorithms.adam import Adam, AdamW
from zerograph.optim.algorithms.lamb import LAMB
from zerograph.optim.algorithms.lion import Lion
from zerograph.optim.algorithms.muon import Muon
from zerograph.optim.algorithms.one_bit_adam import OneBitAdam
from zerograph.optim.algorithms.sgd import SGD
from zerograph.optim.clip import clip_grad_norm_

__all__ = ["LAMB", "SGD", "Adagrad", "Adam", "AdamW", "Lion", "Muon", "OneBitAdam", "clip_grad_norm_"]
