"""Views that cross from one segment into the next: symbols may be in their sizes, strides or storage offsets alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zerograph

WIDTH = 6
ARRIVES: dict[str, Callable[[int, int], Tensor]] = {
    "contiguous": lambda batch, length: torch.randn(batch, length, WIDTH, dtype=torch.float64),
    "cut off": lambda batch, length: torch.randn(batch, length + 1, WIDTH, dtype=torch.float64)[:, 1:],
    "transposed": lambda batch, length: torch.randn(length, batch, WIDTH, dtype=torch.float64).transpose(0, 1),
    "expanded": lambda batch, length: torch.randn(1, length, WIDTH, dtype=torch.float64).expand(batch, length, WIDTH),
    "out of the middle": lambda batch, length: torch.randn(3, batch, length, WIDTH, dtype=torch.float64)[1],
}
View = Callable[[Tensor], Tensor]

VIEWS: dict[str, View] = {
    "first": lambda h: h.select(1, 0),
    "last": lambda h: h.select(1, -1),
    "middle": lambda h: h.select(1, h.shape[1] // 2),
    "center": lambda h: h.select(0, h.shape[0] // 2),
    "tail": lambda h: h[:, 1:],
    "half": lambda h: h[:, h.shape[1] // 2 :],
    "every second": lambda h: h[:, ::2],
    "every second from the second": lambda h: h[1::2],
    "transposed": lambda h: h.transpose(0, 1),
    "reversed": lambda h: h.movedim(0, -1),
    "expanded": lambda h: h.unsqueeze(0).expand(3, *h.shape),
    "expanded by its length": lambda h: h.unsqueeze(1).expand(h.shape[0], h.shape[1], *h.shape[1:]),
    "flat": lambda h: h.flatten(0, 1),
    "split": lambda h: h.chunk(2, 0)[1],
    "diagonal": lambda h: h.diagonal(0, 0, -1),
    "windows": lambda h: h.unfold(1, 2, 1),
    "strided": lambda h: torch.as_strided(h, (h.shape[1],), (h.stride(1),), h.storage_offset() + h.stride(0)),
}


class Edges(nn.Module):
    """Hands each of several chains of views over to a segment of its own: reading a parameter cuts the graph."""

    def __init__(self, chains: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.scales = nn.ModuleList(Scale() for _ in chains)
        self.chains = chains

    def forward(self, x: Tensor) -> Tensor:
        h, total = self.first(x), torch.zeros(())
        for scale, chain in zip(self.scales, self.chains, strict=True):
            total = total + scale(viewed(h, chain))
        return total


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sin().sum()


def viewed(x: Tensor, chain: Sequence[str]) -> Tensor:
    for name in chain:
        if x.ndim > 1 and min(x.shape[:2]) > 1:
            x = VIEWS[name](x)
    return x


def check(chains: Sequence[Sequence[str]], arrives: str, sizes: Sequence[tuple[int, int]], compute: str) -> None:
    """``Edges(chains)`` compiled equals itself plain, in value and gradients, at all of ``sizes``."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Edges(chains).double()  # sines of sums of sines make much of the last bits of float32
    model = copy.deepcopy(plain)
    model.compile(backend=zerograph.backend(dtype=torch.float64, bucket_size=1, compute=compute))
    varying = [i for i, dimension in enumerate(zip(*sizes, strict=True)) if len(set(dimension)) > 1]
    for batch, length in sizes:
        x = ARRIVES[arrives](batch, length)
        torch._dynamo.maybe_mark_dynamic(x, varying)
        for m in (plain, model):
            m.zero_grad()
            m(x).backward()
        for name, param in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad, param.grad, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(model(x), plain(x))


SIZES = st.one_of(st.just((8, 8, 8)), st.lists(st.integers(7, 40), min_size=3, max_size=3, unique=True).map(tuple))
CHAINS = st.lists(st.lists(st.sampled_from(sorted(VIEWS)), min_size=1, max_size=2), min_size=3, max_size=6)


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(chains=CHAINS, arrives=st.sampled_from([*ARRIVES]), batches=SIZES, lengths=SIZES)
@example([[name] for name in VIEWS], "cut off", (8, 8, 8), (7, 9, 12))
@example([[name] for name in VIEWS], "transposed", (7, 9, 12), (8, 8, 8))
def test_any_view(chains: list[list[str]], arrives: str, batches: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    check(chains, arrives, list(zip(batches, lengths, strict=True)), "eager")


@pytest.mark.parametrize(("view", "batches", "lengths"), [("first", (8, 8), (7, 9)), ("center", (8, 9), (8, 8))])
def test_views_in_compiled_segments(view: str, batches: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    """Of symbols in strides alone, and in the storage offset alone."""
    check([[view]], "contiguous", list(zip(batches, lengths, strict=True)), "inductor")
