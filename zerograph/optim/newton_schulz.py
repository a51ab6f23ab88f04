"""The orthogonal factor of matrices by Newton-Schulz iterations, as ``torch.optim.Muon`` computes it (Jordan et al.,
"Muon: An optimizer for hidden layers in neural networks", 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Iterations(NamedTuple):
    """The arguments of ``torch.optim.Muon`` by these names."""

    ns_coefficients: tuple[float, float, float]
    ns_steps: int
    eps: float

    def cost(self, rows: int, columns: int) -> int:
        """Multiplications for one matrix of that shape."""
        small, large = sorted((rows, columns))
        return self.ns_steps * small * small * (2 * large + small)


def orthogonalized(matrices: Sequence[Tensor], iterations: Iterations) -> list[Tensor]:
    """The factor of each of ``matrices``, which are in bfloat16 and on one device.

    On a device those of one shape are one batch. On a CPU a batch would save nothing, and one by one each result has
    torch's bits, whatever is computed beside it.
    """
    if matrices and matrices[0].is_cpu:
        return [_iterated(matrix, [matrix], iterations, torch.addmm) for matrix in matrices]
    places: dict[torch.Size, list[int]] = {}
    for place, matrix in enumerate(matrices):
        places.setdefault(matrix.shape, []).append(place)
    found = list(matrices)
    for alike in places.values():
        own = [matrices[i] for i in alike]
        batch = _iterated(torch.stack(own), own, iterations, torch.baddbmm)
        for place, result in zip(alike, batch.unbind(), strict=True):
            found[place] = result
    return found


def _iterated(
    batch: Tensor, matrices: Sequence[Tensor], iterations: Iterations, add_product: Callable[..., Tensor]
) -> Tensor:
    """The factors of ``batch``, one matrix, or several with their dimensions at the end."""
    a, b, c = iterations.ns_coefficients
    is_tall = batch.shape[-2] > batch.shape[-1]
    # One by one: a reduction over a batch may add up in another order, and half of a bit scales a matrix.
    norms = torch.stack([m.T.norm() if is_tall else m.norm() for m in matrices]).clamp(min=iterations.eps)
    batch = (batch.mT if is_tall else batch) / norms.view(-1, *[1] * (batch.ndim - 1))
    for _ in range(iterations.ns_steps):
        gram = batch @ batch.mT
        gram = add_product(gram, gram, gram, beta=b, alpha=c)
        batch = add_product(batch, gram, batch, beta=a)
    return batch.mT if is_tall else batch
