"""Optimizers whose whole step is one native call, and work on sharded parameters between backward and step."""

from zerograph.optim.adagrad import Adagrad
from zerograph.optim.adam import Adam, AdamW
from zerograph.optim.clip import clip_grad_norm_
from zerograph.optim.lion import Lion
from zerograph.optim.sgd import SGD

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion", "clip_grad_norm_"]
