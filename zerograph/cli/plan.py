"""``zerograph plan``: compile a model for simulated ranks on the meta device, and write what a step of it would do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from zerograph.cli.model_source import model_maker
from zerograph.cli.options import SIZE, Parsed
from zerograph.cli.size_options import SIZES, sizes
from zerograph.cli.terminal import progress, show_lines
from zerograph.cli.verbosity import model_code, verbose_option
from zerograph.cli.view.summary import show_summary
from zerograph.core.config import ACTIVATIONS, OFFLOAD, STAGES
from zerograph.core.errors import ConfigError
from zerograph.core.files.planfile import PlanFile
from zerograph.core.files.reading import check_writable
from zerograph.core.machine import DTYPES, OFFLOAD_TIERS, PRECISIONS, machine_from
from zerograph.core.plan import OVERLAPS, UPDATES
from zerograph.core.step import Dimension
from zerograph.core.units import format_bytes
from zerograph.core.wire import GATHER_WIRES, REDUCE_WIRES
from zerograph.planner.estimate.estimate import RESERVE
from zerograph.planner.estimate.sizes import ModelSize, format_count
from zerograph.planner.explain.reasons import runs


def _or(number: Callable[[str], float], *words: str) -> Callable[[str], str | float]:
    """A parser of a number, or of one of ``words``."""
    return lambda text: text if text in words else number(text)


_STAGE = "ZeRO stage; auto fills the memory."
_OFFLOADED = (
    "Tensors that may leave the device; each choice includes those before it. Backends run plans with NVMe, and on "
    "GPUs with the host."
)
_BESIDE = (
    "The optimizer's argument: backward is overlap=True, where backwards update what they have done with; forward is "
    'overlap="forward", where updates of what left the device run beside the next forward; delayed is delayed=True, '
    "where they run beside the whole next step; auto is the fastest of none, forward and backward, which change no "
    "number (backward allows no clipping)."
)
_UPDATED = "Where states on the host are updated; auto is the faster."
_SAVED = "Where saved activations wait for the backward; auto is the device, or with --offload a choice by layer."
_TILE = "Tiles of each large weight of a linear layer; auto has none, or chooses with --offload."
_LOSS_TILES = "Tiles of tokens that head and loss run in; auto has one, or chooses with --offload."
_ACCUMULATE = "Micro-batches of a step, of --batch sequences each; the plan is that of one."
_CHOSEN = "chosen at stage auto and with --offload"
RECOMPUTE = Parsed("auto|none|full|0..1", _or(float, "auto", "none", "full"))
TILE = Parsed("auto|off|N", _or(int, "auto", "off"))
_TOKEN_TILES = "Tiles of tokens that MLPs of recomputed layers run in; auto has one, or more where nothing else fits."
_BATCH_TILES = "Parts of the batch that layers run for, one after another; auto likewise."
TILES = Parsed("auto|N", _or(int, "auto"))


@click.command()
@click.argument("model", required=False)
@sizes
@click.option("--world", type=click.IntRange(1), default=1, show_default=True, help="Ranks to shard over.")
@click.option(
    "--replicas", type=click.IntRange(1), default=1, show_default=True, help="Such groups of ranks, with equal shards."
)
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences per rank.")
@click.option("--seq", type=click.IntRange(1), default=1024, show_default=True, help="Tokens per sequence.")
@click.option("--stage", type=click.Choice((*STAGES, "auto")), default=3, show_default=True, help=_STAGE)
@click.option("--machine", default="h100-80gb", show_default=True, help="A preset, or a file from `zerograph bench`.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Whose operators the step is traced with.  [default: cuda where torch finds a GPU, and Triton is there]",
)
@click.option("--memory", type=SIZE, help="Device memory a rank may use: 70GiB.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Compute dtype.")
@click.option(
    "--matmul-precision",
    "precision",
    type=click.Choice(PRECISIONS),
    default="highest",
    show_default=True,
    help="float32 products: torch's default, or high (TF32).",
)
@click.option("--gather-wire", type=click.Choice(GATHER_WIRES), help="Format that matrices are gathered in.")
@click.option("--reduce-wire", type=click.Choice(REDUCE_WIRES), help="Format that gradients of matrices are sent in.")
@click.option("--bucket-size", help=f"Gathered bytes per collective.  [default: 32MiB; {_CHOSEN}]")
@click.option(
    "--prefetch",
    type=click.IntRange(0),
    help=f"Buckets gathered ahead, where memory allows.  [default: 1; {_CHOSEN}]",
)
@click.option("--recompute", type=RECOMPUTE, default="auto", show_default=True, help="auto, none, full or 0..1.")
@click.option("--largest", "what", type=click.Choice(["batch", "seq"]), help="Find the largest that fits.")
@click.option("--offload", type=click.Choice(OFFLOAD), default="none", show_default=True, help=_OFFLOADED)
@click.option("--tier", type=click.Choice(OFFLOAD_TIERS), help="Offload there only.  [default: chosen]")
@click.option("--overlap", type=click.Choice((*OVERLAPS, "auto")), default="none", show_default=True, help=_BESIDE)
@click.option("--update", type=click.Choice((*UPDATES, "auto")), default="host", show_default=True, help=_UPDATED)
@click.option("--activations", type=click.Choice(ACTIVATIONS), default="auto", show_default=True, help=_SAVED)
@click.option("--tile", type=TILE, default="auto", show_default=True, help=_TILE)
@click.option("--loss-tiles", type=TILES, default="auto", show_default=True, help=_LOSS_TILES)
@click.option("--token-tiles", type=TILES, default="auto", show_default=True, help=_TOKEN_TILES)
@click.option("--batch-tiles", type=TILES, default="auto", show_default=True, help=_BATCH_TILES)
@click.option("--accumulate", "micro_batches", type=click.IntRange(1), default=1, show_default=True, help=_ACCUMULATE)
@click.option("--loss-only", is_flag=True, help="Training returns its loss alone.")
@click.option("--moments", type=click.IntRange(0), default=2, show_default=True, help="Optimizer states per parameter.")
@click.option("--whole", is_flag=True, help="Trace every layer, not a few of those that are alike.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan file here.")
@click.option("--explain", is_flag=True, help="Say why each decision was made.")
@click.option("--json", "json_", is_flag=True, help="Write the plan file to stdout.")
@verbose_option
def plan(
    model: str | None,
    what: Dimension | None,
    output: Path | None,
    explain: bool,
    json_: bool,
    verbose: bool,
    **options: Any,
) -> int:
    """Plan a training step without running it, and write a plan file.

    MODEL is file.py:callable or module:callable. The callable returns a model, or a model and its inputs (a tuple, or a
    dict of keyword arguments), and is called on the meta device: nothing of any size is allocated. A model without
    inputs gets token ids of --batch by --seq. MODEL may also be the config.json of a Hugging Face causal language
    model. Without MODEL, sizes describe a plain transformer: --params 70B --layers 80 --hidden 8192 --vocab 128k.
    Missing sizes are derived. Exits with 1 when the step does not fit.

    --offload searches a plan over the memory of device, host and NVMe together: where shards and saved activations
    live, and which large operators run in tiles.

    --largest finds the largest batch or sequence that fits the memory, and plans that: it traces the step at a few
    sizes.

    --memory, and stage auto, search for the fastest plan that fits; options that you give stay as they are.
    """
    if output is not None:
        check_writable(output)
    extents = {name: options.pop(name) for name in SIZES}
    size = _size(model, **extents)
    memory = options.pop("memory")
    machine = machine_from(options.pop("machine"), memory).with_precision(options.pop("precision"))
    if what is not None and options.pop("micro_batches") > 1:
        raise ConfigError(f"--accumulate is given with --largest {what}", "find the largest first, then plan that")
    if memory is not None and options["offload"] == "none" and what is None:
        options["memory"] = memory  # to search within, whatever the stage
    options["repeat_layers"] = not options.pop("whole")
    # None leaves an option to its default; of a dtype it is a value, each parameter's own.
    options = {name: value for name, value in options.items() if value is not None or name == "dtype"}
    with progress() as say, model_code(verbose):
        say("importing torch and the model")
        name, make = _model(model, size, options["batch"], options["seq"])
        from zerograph.dryrun.compile_only import device_to_trace  # behind the model, whose folder may hide a module

        options["device"] = device_to_trace(options.get("device"), machine)
        say(f"tracing {name} for {options['world']} simulated ranks, with the operators of {options['device']}")
        if what is None:
            from zerograph.dryrun.forecast import plan_file

            file, answer = plan_file(name, make, machine, reserve=RESERVE, **options), ""
        else:
            from zerograph.dryrun.largest_fit import describe_answer, largest_file

            found = largest_file(name, make, machine, what, reserve=RESERVE, **options)
            file, answer = found.file, describe_answer(what, found.found, found.budget)
    if answer:
        click.echo(answer, err=json_)  # with --json, stdout is the plan file's
    if output is not None:
        output.write_text(file.to_json())
        click.echo(f"wrote {output}", err=True)
    if json_:
        click.echo(file.to_json())
    else:
        show_summary(file)
        show_lines(explanation(file) if explain else ())
    return _report_overruns(file)


def _size(model: str | None, **extents: int | None) -> ModelSize | None:
    """The model that is given by its sizes; None where one is named."""
    given = [f"--{name}" for name, value in extents.items() if value is not None]
    if model is not None:
        if given:
            hint = "leave out the model, or the sizes; `zerograph estimate` takes both"
            raise ConfigError(f"{model} has its own sizes, and {', '.join(given)} is told", hint)
        return None
    if not given:
        raise ConfigError("there is nothing to plan", "give MODEL, or sizes: --params 70B, or --layers and --hidden")
    size = ModelSize.of(extents.pop("params"), **extents)
    if size.hidden % size.heads:
        raise ConfigError(f"hidden {size.hidden} does not divide into {size.heads} heads", "give other --heads")
    return size


def _model(model: str | None, size: ModelSize | None, batch: int, seq: int) -> tuple[str, Callable[[], Any]]:
    """The name of the model, and the function that makes it."""
    if size is None:
        assert model is not None, "one of the two is given"
        source = click.get_current_context().get_parameter_source
        given = [f"--{name}" for name in ("batch", "seq") if source(name) is ParameterSource.COMMANDLINE]
        return model, model_maker(model, batch=batch, seq=seq, given=given)
    from zerograph.cli.sized import transformer

    count, asked = format_count(size.formula), format_count(size.parameters)
    name = f"transformer of {count} parameters"
    if count != asked:
        click.echo(f"{asked} asked: whole layers and heads make it {count}", err=True)
    click.echo(f"{name}: {size.layers} layers, hidden {size.hidden}, {size.heads} heads, vocab {size.vocab}", err=True)
    return name, lambda: transformer(size, batch, seq)


def explanation(file: PlanFile) -> Iterator[str]:
    """The decisions and their reasons; those that hold for many layers in one line."""
    subjects: dict[tuple[str, str], list[str]] = {}
    for reason in file.reasons:
        subjects.setdefault((reason.decision, reason.why), []).append(reason.subject)
    yield ""
    for (decision, why), of in subjects.items():
        yield f"{', '.join(runs(of))}: {decision}, because {why}"


def _report_overruns(file: PlanFile) -> int:
    over = {t: p for t, p in file.forecast.peaks.items() if p.bytes > file.budget[t]}
    for tier, peak in over.items():
        need, have = format_bytes(peak.bytes), format_bytes(file.budget[tier])
        click.echo(f"error: {tier} memory: needs {need}, has {have}, at {peak.name} {peak.source}", err=True)
    if over:
        hint = "more ranks, or a machine with more of it; see `zerograph estimate`"
        if "device" in over:
            hint = "--memory searches for a plan that fits, and says what would help where none does"
        click.echo(f"\nhint: {hint}", err=True)
    return 1 if over else 0
