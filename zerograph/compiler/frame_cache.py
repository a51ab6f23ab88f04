"""Compiled frames, on disk: the next start of a training traces its frames with Dynamo and loads the rest.

A frame is stored under a digest of all that decides what becomes of it: Dynamo's graph with the modules and source
lines of its nodes, its inputs, the backend's arguments, the instruction set, and the versions and settings of torch and
ZeroGraph. Frames that the digest cannot tell apart are not stored: dynamic sizes, tensor subclasses, operators of other
libraries.

Every rank looks for itself, and one may load what another one compiles. A rank that loads takes the same part in
agreements on plans and collectives as one that compiles, so the others cannot tell.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from zerograph import passes, runtime
from zerograph.compiler.frame import Frame
from zerograph.compiler.frame_plan import Found, Planner
from zerograph.compiler.lowering.torch_private import vector_instructions
from zerograph.compiler.torch_private import (
    Uncacheable,
    facts_of_input,
    frame_folder,
    graph_key,
    namespace_of,
    noting_wrappers,
    with_wrappers,
)
from zerograph.core.files.planfile import PassRecord
from zerograph.core.files.private_folder import PrivateFolder
from zerograph.core.instructions import Compute
from zerograph.core.plan import Plan
from zerograph.core.program import Program
from zerograph.core.step import Step
from zerograph.runtime.executor.executor import Executor

log = logging.getLogger(__name__)

_KNOWN = {"aten", "prims", "zg", "zerograph", "higher_order"}
"""Libraries of operators that change with the versions of torch and ZeroGraph alone."""
_NODE_FACTS = ("stack_trace", "custom", "recompute", "ac_graph_id")
"""Metadata of Dynamo's nodes that passes and reports read, besides the module."""


@dataclass(frozen=True, slots=True)
class _StoredFrame:
    """A compiled frame, as it is stored.

    Attributes:
        found: what this rank's search for the plan came to.
        segments: by digest, as Inductor stores them.
        wrappers: what AOTAutograd has around the programs.
    """

    step: Step
    plan: Plan
    found: Found | None
    passes: list[PassRecord]
    programs: dict[str, Program]
    segments: dict[str, Any]
    wrappers: bytes


@dataclass(frozen=True, slots=True)
class FrameFile:
    """Where one frame is stored; nowhere without a ``name``.

    Attributes:
        noted: what AOTAutograd has around the programs, once they are compiled.
    """

    planner: Planner
    folder: PrivateFolder
    name: str
    noted: list[bytes | Uncacheable] = field(default_factory=list)

    @classmethod
    def of(cls, planner: Planner, frame: Frame, gm: fx.GraphModule, inputs: Sequence[Any]) -> FrameFile:
        """The entry of a graph that Dynamo handed over."""
        folder, name = frame_folder(), ""
        if folder is not None and frame.compilation.segments.compute == "inductor":
            try:
                facts = [*_versions(), planner.facts, *_facts(frame), *_inputs(inputs), *_nodes(gm)]
                facts.append(graph_key(gm, inputs))
                name = hashlib.sha256("\n".join(facts).encode()).hexdigest()
            except Uncacheable as reason:
                log.debug("frame %d is not stored: %s", frame.index, reason)
        return cls(planner, PrivateFolder(folder or Path()), name)

    def load(self, frame: Frame) -> Callable[..., Any] | None:
        """Fill in ``frame``, and return what Dynamo calls; None where that is not stored."""
        start, made = time.perf_counter(), frame.compilation
        data = self.folder.read(self.name) if self.name else None
        if data is None:
            return None
        try:
            stored: _StoredFrame = pickle.loads(data)
            segments = {digest: made.segments.load(digest, segment) for digest, segment in stored.segments.items()}
        except Exception as error:  # of any kind: files of Inductor's that it refers to may be gone
            log.warning("frame %d is compiled, as it cannot be loaded from %s: %s", frame.index, self.path, error)
            return None
        if not self.planner.plans_again(frame.code, stored.step, frame.plain, stored.plan, stored.found):
            log.info("frame %d is compiled, as ranks agreed on another plan than it is stored with", frame.index)
            return None
        assert made.runtime_for is not None
        frame.step, frame.plan, frame.passes, frame.programs = stored.step, stored.plan, stored.passes, stored.programs
        shared = frame.runtime = made.runtime_for(frame.index, frame.code, frame.plan)
        compiled = with_wrappers(
            stored.wrappers,
            {
                kind: Executor(program, [segments[segment.digest] for segment in program.segments], shared)
                for kind, program in stored.programs.items()
            },
        )
        computing = (i for program in stored.programs.values() for i in program.instructions if isinstance(i, Compute))
        made.segments.requested += sum(1 for _ in computing)
        frame.seconds += time.perf_counter() - start
        log.info("frame %d was loaded from %s", frame.index, self.path)
        return compiled

    def noting(self) -> AbstractContextManager[None]:
        """Inside, the frame is compiled, to be stored."""
        return noting_wrappers(self.noted) if self.name else nullcontext()

    def store(self, frame: Frame) -> None:
        """Write what ``frame`` became, if it was compiled here."""
        if not self.noted:
            return
        try:
            digests = {segment.digest for program in frame.programs.values() for segment in program.segments}
            stored = _StoredFrame(
                replace(frame.step),  # without what was derived of it
                frame.plan,
                self.planner.found(frame.step),
                frame.passes,
                frame.programs,
                frame.compilation.segments.stored(digests),
                self._wrappers(),
            )
            data = pickle.dumps(stored)
        except Exception as error:  # of any kind: pickle says in many ways that it cannot
            log.debug("frame %d is not stored: %s", frame.index, error)
            return
        self.folder.write(self.name, data)

    def _wrappers(self) -> bytes:
        (wrappers,) = self.noted
        if isinstance(wrappers, Uncacheable):
            raise wrappers
        return wrappers

    @property
    def path(self) -> Path:
        """Its file."""
        return self.folder.path / self.name


@cache
def _versions() -> tuple[str, ...]:
    """Python's version, the processor's instructions, and a digest of ZeroGraph's own source. Torch's version is in its
    key."""
    source = hashlib.sha256()
    rooms = [Path(__file__).parents[1], *map(Path, (*passes.__path__, *runtime.__path__))]
    for path in sorted({path for room in rooms for path in room.rglob("*.py")}):
        source.update(path.read_bytes())
    return sys.version, torch.backends.cpu.get_cpu_capability(), source.hexdigest()


def _facts(frame: Frame) -> Iterator[str]:
    made = frame.compilation
    yield vector_instructions() if made.device.type == "cpu" else ""  # to find them takes a C++ compiler
    yield _settings()
    yield repr((made.world_size, str(made.device), made.repeats_layers, sorted(made.tied.items())))
    yield repr((frame.plain, frame.ends_at_break))


def _settings() -> str:
    """Torch's, as far as a trace depends on them and torch's key does not hold them."""
    cuda, einsum = torch.backends.cuda, torch.backends.opt_einsum
    attention = [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()]
    attention.append(cuda.cudnn_sdp_enabled())
    return repr((attention, einsum.enabled, einsum.strategy, torch.backends.mkldnn.enabled, torch.get_default_device()))


def _inputs(inputs: Sequence[Any]) -> Iterator[str]:
    seen = dict[object, int]()
    for place, value in enumerate(inputs):
        *facts, memory = facts_of_input(value)
        yield repr((*facts, seen.setdefault(memory, place)))  # which inputs share memory, and not where that is


def _nodes(gm: fx.GraphModule) -> Iterator[str]:
    """The facts about nodes that :func:`~zerograph.compiler.torch_private.graph_key` leaves out.

    Raises:
        Uncacheable: one calls an operator whose code may change while all versions stay.
    """
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            library = namespace_of(node.target)
            if library and library not in _KNOWN:
                raise Uncacheable(f"operators of {library} may change unseen")
            stack = node.meta.get("nn_module_stack") or {}
            yield repr([path for path, _ in stack.values()] + [node.meta.get(key) for key in _NODE_FACTS])
