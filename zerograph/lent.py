"""Full copies of parameters that code outside of any graph reads; what is written into them would be lost.

``model.up.weight.fill_(0)`` changes a gathered copy, which nobody reads again. Each copy is handed out with a probe: a
tensor without memory that shares the copy's version counter, which every in-place operation raises, on views too.
Probes are looked at when the parameter is read again, before a program runs, an optimizer steps or a state is saved.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from zerograph.core.errors import ShardingError

_HINT = "change it on all ranks inside `with zerograph.gathered(module, writeback=True):`"


class Assignable(Tensor):
    """What ``.data`` is taken of. A plain tensor's would be an alias with a version counter of its own."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """An alias outside of autograd that counts writes with the copy."""
        return self.as_subclass(Tensor).detach()  # type: ignore[no-any-return, no-untyped-call]

    @data.setter
    def data(self, value: Tensor) -> None:
        raise ShardingError("the .data of a sharded parameter's full copy was assigned, which would be lost", _HINT)


@dataclass(slots=True)
class _Loan:
    """One copy: whose, read where, and the version it was handed out with; ``copy`` dies with its last holder."""

    name: str
    at: str
    copy: weakref.ref[Tensor]
    probe: Tensor
    version: int

    def changed(self) -> bool:
        """Whether the copy was written to since it was last asked."""
        before, self.version = self.version, self.probe._version
        return before != self.version


# By outward parameter, of all models: a module that is read knows its parameters and no backend. Empty between steps
# of a loop that reads no weights.
_LOANS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def lend(full: Tensor, param: Tensor, name: str, reader: FrameType) -> Tensor:
    """Hand out ``full``, a fresh copy of ``param``, to the code that ``reader`` runs.

    Raises:
        ShardingError: an earlier copy of ``param`` was written to.
    """
    _refuse(_LOANS.get(param, ()))
    probe = full.detach()
    probe.data = full.new_empty(0)  # keeps the version counter, and none of the memory
    at = f"{os.path.basename(reader.f_code.co_filename)}:{reader.f_lineno}"
    loan = _Loan(name, at, weakref.ref(full), probe, probe._version)
    _LOANS[param] = [*_held(_LOANS.get(param, ())), loan]
    return full


def refuse_lost_edits() -> None:
    """Look whether copies handed out so far were written to, and forget those that nobody holds any more.

    Raises:
        ShardingError: naming the first one, and where it was read; once for each edit.
    """
    if not _LOANS:
        return
    found = list(_LOANS.items())
    _LOANS.clear()
    for param, loans in found:
        held = _held(loans)
        if held:
            _LOANS[param] = held
    _refuse([loan for _, loans in found for loan in loans])


def _held(loans: Any) -> list[_Loan]:
    return [loan for loan in loans if loan.copy() is not None]


def _refuse(loans: Any) -> None:
    changed = [loan for loan in loans if loan.changed()]
    if changed:
        raise ShardingError(
            f"parameter {changed[0].name} is sharded, and the full copy of it that {changed[0].at} read was changed "
            "in place: the change is lost",
            _HINT,
        )
