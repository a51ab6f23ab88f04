"""A transformer given by its sizes alone: what an estimate needs when there is no model to trace."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

from zerograph.core.errors import ConfigError

_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MOST = 10**15
"""The largest count: a thousand trillion parameters, ranks or tokens."""
_GPT2_VOCAB = 50_257
_ASPECT = 128
"""Hidden size per layer where only a parameter count is known: GPT-3 175B and Llama 7B have 128."""
_HEAD = 128
"""Hidden sizes are derived as multiples of this, and a head is this wide: GPT-3, Llama."""


def parse_count(text: str | int) -> int:
    """The number in ``text``: an int, or a decimal with k, M, B or T (powers of 1000) such as ``"70B"``.

    Raises:
        ValueError: the text is no count, or is not a whole number of at least 1.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMBT]?)\s*", str(text).upper())
    count = Fraction(match[1]) * _COUNTS[match[2]] if match else Fraction(0)
    if count < 1:
        raise ValueError(f"{text!r} is not a count such as 1024, '128k', '70B' or '1.5T'")
    if count.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number")
    if count > _MOST:
        raise ValueError(f"{str(text)[:40]} is more than a thousand T")
    return int(count)


def format_count(count: float) -> str:
    """``count`` with three significant digits and a decimal unit: ``"70B"``, ``"1.01T"``."""
    for unit in ("", "k", "M", "B"):
        if count < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}T"


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A GPT-like transformer: ``layers`` blocks of attention (4*h*h weights) and MLP (8*h*h), and one embedding.

    Attributes:
        parameters: of the whole model, as given or ``12*L*h*h + V*h`` (Megatron-LM, biases and norms left out).
        layers, hidden, vocab, heads: L, h, V and a in the formulas.
    """

    parameters: int
    layers: int
    hidden: int
    vocab: int
    heads: int

    @classmethod
    def of(
        cls,
        parameters: int | None = None,
        *,
        layers: int | None = None,
        hidden: int | None = None,
        vocab: int | None = None,
        heads: int | None = None,
    ) -> ModelSize:
        """A size with what is missing derived from ``12*L*h*h + V*h``.

        A parameter count alone gets a hidden size of 128 per layer, which GPT-3 and Llama 7B have. The vocabulary is
        GPT-2's unless given, heads are 128 wide.

        Raises:
            ConfigError: neither ``parameters`` nor both ``layers`` and ``hidden``, or a value below 1.
        """
        _positive(parameters=parameters, layers=layers, hidden=hidden, vocab=vocab, heads=heads)
        vocab = vocab or _GPT2_VOCAB
        if parameters is None:
            if layers is None or hidden is None:
                raise ConfigError("the size of the model is open", "give --params 70B, or --layers and --hidden")
            parameters = _count(layers, hidden, vocab)
        if hidden is None:
            hidden = _hidden(parameters, layers, vocab) if layers else _balanced_hidden(parameters, vocab)
        if layers is None:
            layers = max(1, round((parameters - vocab * hidden) / (12 * hidden**2)))
        return cls(parameters, layers, hidden, vocab, heads or max(1, hidden // _HEAD))

    @classmethod
    def balanced(cls, rung: int, vocab: int | None = None) -> ModelSize:
        """Number ``rung`` of a ladder of models that grow in all of depth, width and heads: 128 hidden per layer."""
        return cls.of(layers=rung, hidden=_ASPECT * rung, vocab=vocab)

    def with_layers(self, layers: int) -> ModelSize:
        """The model with that many layers and the parameters that the formula gives."""
        return ModelSize.of(layers=layers, hidden=self.hidden, vocab=self.vocab, heads=self.heads)

    @property
    def formula(self) -> int:
        """Parameters by ``12*L*h*h + V*h``; differs from :attr:`parameters` where those were given."""
        return _count(self.layers, self.hidden, self.vocab)


def _positive(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")


def _count(layers: int, hidden: int, vocab: int) -> int:
    return 12 * layers * hidden**2 + vocab * hidden


def _hidden(parameters: int, layers: int, vocab: int) -> int:
    """The root h of ``12*L*h*h + V*h = parameters``, at a multiple of the head width."""
    root = (isqrt(vocab**2 + 48 * layers * parameters) - vocab) / (24 * layers)
    return _HEAD * max(1, round(root / _HEAD))


def _balanced_hidden(parameters: int, vocab: int) -> int:
    def size(rung: int) -> int:
        return _count(rung, _ASPECT * rung, vocab)

    # Sizes grow with the rung, so the two next to the count are found by bisection.
    above = 1 + bisect_left(range(1, 1 << 16), parameters, key=size)
    below = max(1, above - 1)
    return _ASPECT * (above if size(above) - parameters < parameters - size(below) else below)
