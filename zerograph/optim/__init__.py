"""Optimizers whose whole step is one native call, and work on sharded parameters between backward and step."""

from zerograph.optim.algorithms.adagrad import Adagrad
from zerograph.optim.algorithms.adam import Adam, AdamW
from zerograph.optim.algorithms.lion import Lion
from zerograph.optim.algorithms.sgd import SGD
from zerograph.optim.clip import clip_grad_norm_

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion", "clip_grad_norm_"]
