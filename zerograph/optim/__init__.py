"""Work on sharded parameters between backward and step."""

from zerograph.optim.clip import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
