"""``zerograph estimate``: does a model fit, and how fast is it, from its sizes.

Sizes that are given need no torch, no model and no device; those of a MODEL are read from it on the meta device.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import click

from zerograph.cli.estimate_view import BELOW, NUMBERS, as_data, cells
from zerograph.cli.options import SIZE
from zerograph.cli.size_options import COUNT, SIZES, sizes
from zerograph.cli.terminal import progress, show_table
from zerograph.cli.verbosity import model_code, verbose_option
from zerograph.cli.view.summary import outside
from zerograph.core.errors import ConfigError
from zerograph.core.machine import OFFLOAD_TIERS, PRESETS, TIERS, Tier, machine_from
from zerograph.core.plan import OFFLOADS, Offload
from zerograph.planner.estimate.estimate import RESERVE, Question, Row, estimate_rows, fastest
from zerograph.planner.estimate.largest_estimate import WHATS, What, largest_estimate
from zerograph.planner.estimate.shortage import Shortage, shortage
from zerograph.planner.estimate.sizes import ModelSize, format_count
from zerograph.planner.estimate.strategy import ACTIVATIONS, STAGES
from zerograph.planner.estimate.training import ATTENTIONS, OPTIMIZERS, Training

if TYPE_CHECKING:
    from zerograph.planner.search.largest_size import Budget, LargestSize

Solved: TypeAlias = "tuple[LargestSize, Budget]"
"""The largest size of a traced step, and the bytes of the device, or of each tier, that it could use."""

_SHARE = click.FloatRange(0, 1, max_open=True)
_LAYOUTS = "Model states: ZeroGraph's, mixed-precision Adam (2+2+12 bytes), or AdamW in float32 (4+4+8)."
_SCORES = "Whether attention stores its scores (whole) or not (fused)."


@click.command()
@click.argument("model", required=False)
@sizes
@click.option("--world", type=COUNT, default=1, show_default=True, help="Ranks.")
@click.option("--batch", type=COUNT, default=1, show_default=True, help="Sequences per rank and micro-batch.")
@click.option("--accumulate", type=COUNT, default=1, show_default=True, help="Micro-batches per step.")
@click.option("--seq", type=COUNT, default=1024, show_default=True, help="Tokens per sequence.")
@click.option("--machine", default="h100-80gb", show_default=True, help=f"A file, or {', '.join(PRESETS)}.")
@click.option("--memory", type=SIZE, help="Device memory a rank may use, such as 70GiB; the machine's unless given.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Compute dtype.")
@click.option("--optimizer", type=click.Choice(OPTIMIZERS), default="zerograph", show_default=True, help=_LAYOUTS)
@click.option("--attention", type=click.Choice(ATTENTIONS), default="fused", show_default=True, help=_SCORES)
@click.option("--stage", type=click.Choice(STAGES), help="This ZeRO stage only.")
@click.option("--offload", type=click.Choice(OFFLOADS), help="This offload only; each includes those before it.")
@click.option("--tier", type=click.Choice(TIERS), help="Offload to this tier only; device offloads nothing.")
@click.option(
    "--activations", type=click.Choice(ACTIVATIONS), help="Fix the handling of activations; otherwise chosen per row."
)
@click.option("--tiles", type=COUNT, help="Fix the tiles of large operators; otherwise chosen per row.")
@click.option("--reserve", type=_SHARE, default=RESERVE, show_default=True, help="Share of every tier to leave free.")
@click.option("--largest", "what", type=click.Choice(WHATS), help="Find the largest that fits.")
@click.option("--capture", is_flag=True, help="Find the largest batch or seq of MODEL's traced step too.")
@click.option("--check", is_flag=True, help="Exit with 1 when nothing fits.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON to stdout (schema: docs/guide/json.md).")
@verbose_option
def estimate(
    model: str | None, what: What | None, capture: bool, check: bool, as_json: bool, verbose: bool, **options: Any
) -> int:
    """Say whether a model fits, and how fast it would be, from its sizes alone.

    Prints one row per ZeRO stage and offload choice, and marks the fastest that fits.

    Give sizes: --params 70B --layers 80 --hidden 8192 --vocab 128k. Missing sizes are derived; with --params alone,
    hidden is 128 per layer.

    Or give MODEL: file.py:callable or module:callable that returns a model (or a model and its inputs), or the
    config.json of a Hugging Face causal language model. It is built on the meta device: weights are neither allocated
    nor downloaded. --layers, --hidden, --heads and --vocab then replace the sizes of MODEL.

    --largest finds the largest size over all rows. --capture also traces a step of MODEL at a few sizes, and prints the
    largest of that step for each stage: without offload, or with --offload and --tier over all tiers.
    """
    if capture and (model is None or what not in ("batch", "seq")):
        raise ConfigError("--capture solves for batch or seq on the step of a MODEL", "give MODEL and --largest batch")
    with model_code(verbose):
        question = _question(model, what, **options)
    value = None
    if what is not None:
        found = largest_estimate(question, what, layers=options["layers"], hidden=options["hidden"])
        question, value = found.question or found.beyond, found.value
    table = estimate_rows(question)
    missing = shortage(table)
    traced = None
    if capture and what in ("batch", "seq"):
        with model_code(verbose):
            traced = _traced(str(model), what, question)
    _show(model, question, table, missing, what, value, traced, as_json)
    return int(check and missing is not None)


def _question(model: str | None, what: What | None, machine: str, memory: int | None, **options: Any) -> Question:
    sizes = {name: options.pop(name) for name in SIZES}
    steps = {name: options.pop(name) for name in ("batch", "seq", "accumulate", "dtype", "optimizer", "attention")}
    return Question(
        size=_size(what, sizes.pop("params"), **sizes) if model is None else _size_of(model, what, **sizes),
        training=Training(**steps),
        machine=machine_from(machine, memory),
        world_size=options.pop("world"),
        **options,
    )


def _size(what: What | None, params: int | None, **sizes: int | None) -> ModelSize:
    if what != "params":
        return ModelSize.of(params, **sizes)
    if params is not None or sizes["heads"] is not None or (sizes["layers"] and sizes["hidden"]):
        raise ConfigError(
            "--largest params solves for --params, which is also given, or leaves no shape to solve for",
            "leave out --params and --heads; --layers or --hidden may fix one side of the shape, not both",
        )
    return ModelSize.of(layers=sizes["layers"] or 1, hidden=sizes["hidden"] or 128, vocab=sizes["vocab"])


def _size_of(model: str, what: What | None, params: int | None, **given: int | None) -> ModelSize:
    """The sizes of ``model``, those in ``given`` replaced."""
    if params is not None or what == "params":
        raise ConfigError(f"{model} has its own number of parameters", "leave out the model, or --params")
    from zerograph.cli.model_source import model_maker

    with progress() as say:
        say("importing torch and the model")
        from zerograph.dryrun.model_sizes import size_of

        size = size_of(model_maker(model), **given)
    click.echo(
        f"{model}: {format_count(size.parameters)} parameters, {size.layers} layers, hidden {size.hidden}, "
        f"{size.heads} heads, vocabulary {size.vocab}",
        err=True,
    )
    return size


def _traced(model: str, what: Literal["batch", "seq"], question: Question) -> dict[int, Solved]:
    """The largest size on the model's own step, by stage; stages 1 to 3 share one trace."""
    from zerograph.cli.model_source import model_maker

    training, world, machine = question.training, question.world_size, question.machine
    offload, tier = _offloaded(question)
    stages = [stage for stage in STAGES if stage >= max(1, OFFLOADS.index(offload))]
    if question.stage is not None:
        stages = [question.stage]
    with progress() as say:
        say("importing torch and the model")
        from zerograph.dryrun.forecast import refuse_offload
        from zerograph.dryrun.largest_fit import largest_by_stage

        for stage in stages:
            refuse_offload(offload, tier, machine, world, stage)
        make = model_maker(model, batch=training.batch, seq=training.seq)
        say(f"tracing {model} for {world} simulated ranks at several sizes")
        return largest_by_stage(
            make, what, machine, stages, world=world, batch=training.batch, seq=training.seq, dtype=training.dtype,
            offload=offload, tier=tier, reserve=question.reserve,
        )  # fmt: skip


def _offloaded(question: Question) -> tuple[Offload, Tier | None]:
    """The offload of a traced step, and the tier it goes to; the tier "device" is nowhere."""
    offload = question.offload or "none"
    if offload == "none" or question.tier == "device":
        return "none", None
    return offload, question.tier


def _show(
    model: str | None,
    question: Question,
    table: tuple[Row, ...],
    missing: Shortage | None,
    what: What | None,
    value: int | None,
    traced: dict[int, Solved] | None,
    as_json: bool,
) -> None:
    best = fastest(table)
    if as_json:
        click.echo(json.dumps(as_data(model, question, table, best, missing, what, value, traced), indent=2))
        return
    if what is not None:
        number = format_count(value or 0) if what == "params" else str(value)
        click.echo(f"largest {what}: {number}{', from sizes alone' if traced else ''}")
    for stage, solved in (traced or {}).items():
        from zerograph.dryrun.largest_fit import describe_answer

        offload, tier = _offloaded(question)
        where = "nothing offloaded" if offload == "none" else f"{offload} on {tier or ' or '.join(OFFLOAD_TIERS)}"
        click.echo(f"traced step, stage {stage}, {where}: {describe_answer(str(what), *solved)}")
    hosts = question.machine.describe_hosts(question.world_size)
    if hosts:
        click.echo(f"{question.machine.title}: {hosts}")
    show_table(cells(table, best), NUMBERS, BELOW, BELOW)
    if beside := outside(question.machine, question.world_size):
        click.echo(f"{beside}; {question.reserve:.0%} of each device stay free for these and for fragments", err=True)
    if missing:
        click.echo(f"nothing fits: {missing}\n", err=True)
        for remedy in missing.remedies[:6]:
            click.echo(f"hint: {remedy}", err=True)
