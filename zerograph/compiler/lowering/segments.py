"""Compute segments: what tells them apart, and the callables that they are compiled to, each distinct one once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zerograph.compiler.lowering.segment_graph import Body
from zerograph.compiler.lowering.torch_private import (
    compile_segment,
    kernel_settings,
    kernels_in_background,
    loaded_segment,
    prepare_kernels,
    stored_segment,
    wants_cuda_graphs,
)
from zerograph.compiler.lowering.triton_torch_private import triton_kernels_once
from zerograph.compiler.torch_private import Uncacheable

log = logging.getLogger(__name__)
Callee = Callable[[list[Any]], Sequence[Any]]
"""A compiled segment: takes a list of inputs, which it may clear, and returns its outputs."""


@dataclass(slots=True)
class SegmentCache:
    """Compiled segments of one backend, by structural digest."""

    compute: str
    callables: dict[str, Callee] = field(default_factory=dict)
    constants: list[Any] = field(default_factory=list)  # kept alive: digests know them by identity
    of_this_process: set[str] = field(default_factory=set)  # digests that hold such an identity
    settings: tuple[object, ...] = ()  # torch's, by which these were compiled
    requested: int = 0
    preparing: bool = False

    def prepare(self, device: torch.device) -> None:
        """Begin what the first kernel for a CPU needs, in a thread, so that tracing does not wait for it. On a GPU say
        what segments leave out."""
        self.preparing = self.compute == "inductor" and device.type == "cpu"
        if self.preparing:
            prepare_kernels()
        if self.compute == "inductor" and device.type == "cuda" and wants_cuda_graphs():
            log.warning(
                "torch._inductor.config.triton.cudagraphs is on: what lies between collectives is compiled without "
                "CUDA graphs, which would write over what programs still hold, and launches each kernel by itself"
            )

    def get(self, body: Body, digest: str) -> Callee:
        """The callable for ``body``; compiled unless one of the same structure was."""
        self.requested += 1
        found = self.callables.get(digest)
        if found is None:
            gm = body.module()
            if self.preparing:
                self._await_preparation()
            found = compile_segment(gm) if self.compute == "inductor" else interpret(gm)
            self.callables[digest] = found
            # A freed object's id may be given to another one, whose segment would then pass for this one.
            if known := body.known_by_identity():
                self.constants += known
                self.of_this_process.add(digest)
        return found

    def stored(self, digests: Iterable[str]) -> dict[str, Any]:
        """The segments of these digests, fit for pickle.

        Raises:
            Uncacheable: a digest means nothing in another process, or Inductor has not compiled its segment.
        """
        if not self.of_this_process.isdisjoint(digests):
            raise Uncacheable("a segment has constants or dynamic sizes")
        return {digest: stored_segment(self.callables.get(digest)) for digest in digests}

    def load(self, digest: str, stored: Any) -> Callee:
        """The callable of a segment that another process stored, or that is known here."""
        if digest not in self.callables:
            self.callables[digest] = loaded_segment(stored)
        return self.callables[digest]

    def _await_preparation(self) -> None:
        failed = prepare_kernels().exception()  # not of a future that a forked process has from its parent
        if failed is not None:  # the first kernel does it again, and raises the error where there still is one
            log.debug("could not prepare for kernels", exc_info=failed)
        self.preparing = False

    @contextmanager
    def kernels_in_background(self) -> Iterator[None]:
        """Inside, kernels are compiled beside what goes on here; the end waits for them."""
        settings = kernel_settings() if self.compute == "inductor" else ()
        if settings != self.settings:  # which digests do not hold: kernels for others would be taken for these
            self.settings, self.callables = settings, {}
        before = dict(self.callables)
        try:
            if self.compute == "inductor":
                with triton_kernels_once(), kernels_in_background():
                    yield
            else:
                yield
        except BaseException:
            self.callables = before  # the others may still lack kernels
            raise


def interpret(gm: fx.GraphModule) -> Callee:
    """Run a segment uncompiled, with random operators that heed their seeds; with ``compute="eager"`` only."""
    for node in gm.graph.nodes:
        node.target = _SEEDED.get(node.target, node.target)
    gm.recompile()

    def run(args: list[Any]) -> Sequence[Any]:
        values = list(args)
        # As Inductor's callables do: the caller holds no input longer than the segment needs it.
        args.clear()
        return gm(*values)

    return run


def _random(size: Sequence[int], seed: torch.Tensor, mode: str, **_: Any) -> torch.Tensor:
    draw = {"rand": torch.rand, "randn": torch.randn}[mode]
    return draw(size, generator=_generator(seed), device=seed.device, dtype=torch.float32)


def _randint(low: int, high: int, size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
    return torch.randint(low, high, size, generator=_generator(seed), device=seed.device)


def _generator(seed: torch.Tensor) -> torch.Generator:
    return torch.Generator(seed.device).manual_seed(int(seed))


# Inductor's own random operators ignore their seed when they run uncompiled: a mask that the backward draws again would
# not be the forward's.
_SEEDED = {torch.ops.prims.inductor_random.default: _random, torch.ops.prims.inductor_randint.default: _randint}
