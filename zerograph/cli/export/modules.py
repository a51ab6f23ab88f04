"""The modules of a plan as a tree in which repeated layers are one row: what each costs and holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from zerograph.core.files.planfile import Holding, PlanFile, Reason
from zerograph.core.timeline import COMMUNICATION, Span


@dataclass(slots=True)
class Module:
    """One row.

    Attributes:
        label: its own part of the name, ``"attn"``; of repeated layers ``"0-11"``.
        paths: fully qualified names of what it stands for: one, or as many as there are repeated layers.
        spans, holdings, reasons: its own, without its children's.
        children: in order of first use; of repeated layers, the layers.
    """

    label: str
    paths: tuple[str, ...]
    spans: list[Span] = field(default_factory=list)
    holdings: list[Holding] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    children: list[Module] = field(default_factory=list)

    def all_spans(self) -> list[Span]:
        """Its instructions and those of everything in it."""
        return self.spans + [span for child in self.children for span in child.all_spans()]

    def all_holdings(self) -> list[Holding]:
        """The holdings of the module and of everything in it."""
        return self.holdings + [holding for child in self.children for holding in child.all_holdings()]

    def seconds(self) -> tuple[float, float, float]:
        """The seconds of computing, of collectives, and of everything else."""
        compute = communication = other = 0.0
        for span in self.all_spans():
            length = span.end - span.start
            if span.stream == "compute":
                compute += length
            elif span.stream in COMMUNICATION:
                communication += length
            else:
                other += length
        return compute, communication, other

    def source(self) -> str:
        """The first source line known of it."""
        lines = [span.source for span in self.all_spans()] + [holding.source for holding in self.all_holdings()]
        return next(filter(None, lines), "")

    def shape(self) -> tuple[object, ...]:
        """Equal for modules in which the same was decided and that differ in nothing but names of the outermost."""
        decisions = tuple(reason.decision for reason in self.reasons)
        return (decisions, *((child.label, child.shape()) for child in self.children))


def module_tree(file: PlanFile) -> list[Module]:
    """The top level of the tree; a last row without a name has what belongs to no module."""
    root = Module("", ("",))
    index: dict[str, Module] = {"": root}
    for span in file.forecast.spans:
        _module(index, span.module).spans.append(span)
    for holding in file.holdings:
        _module(index, holding.module).holdings.append(holding)
    for reason in file.reasons:
        if reason.subject in index:
            index[reason.subject].reasons.append(reason)
    _collapse(root)
    rest = [Module("", ("",), root.spans, root.holdings)] if root.spans or root.holdings else []
    return root.children + rest


def most_held(holdings: Iterable[Holding], tasks: int) -> int:
    """The most bytes that these occupy together during any one of the tasks."""
    change: dict[int, int] = defaultdict(int)
    for holding in holdings:
        change[max(holding.first, 0)] += holding.bytes
        # Both tasks are included, so it is gone from the next one on.
        change[tasks if holding.last == -1 else holding.last + 1] -= holding.bytes
    level = most = 0
    for task in sorted(change):
        level += change[task]
        most = max(most, level)
    return most


def _module(index: dict[str, Module], path: str) -> Module:
    if path not in index:
        # A bucket over several modules is called by its first and last one, and belongs to neither.
        parent, _, label = path.rpartition(".") if " " not in path else ("", "", path)
        index[path] = Module(label, (path,))
        _module(index, parent).children.append(index[path])
    return index[path]


def _collapse(module: Module) -> None:
    """Put numbered children of the same shape into one row each."""
    for child in module.children:
        _collapse(child)
    alike: dict[tuple[object, ...], list[Module]] = defaultdict(list)
    for child in module.children:
        if child.label.isdigit():
            alike[child.shape()].append(child)
    for layers in alike.values():
        if len(layers) > 1:
            layers.sort(key=lambda layer: int(layer.label))
            paths = tuple(path for layer in layers for path in layer.paths)
            group = Module(_ranges([int(layer.label) for layer in layers]), paths, children=layers)
            at = min(module.children.index(layer) for layer in layers)
            module.children = [child for child in module.children if child not in layers]
            module.children.insert(at, group)


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, shortly: ``"0-3, 5"``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
