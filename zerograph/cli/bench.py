"""``zerograph bench``: measure this machine, for forecasts of what it would do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zerograph.cli.options import as_json, folder
from zerograph.cli.terminal import Cell, progress, show_table
from zerograph.core.files.reading import check_writable
from zerograph.core.units import format_bytes

if TYPE_CHECKING:
    from zerograph.core.machine import Link, Machine


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the machine as JSON here.")
@folder("Measure the disk of this folder.")
@click.option(
    "--world", type=click.IntRange(1), show_default="every GPU; 2 on a CPU", metavar="N", help="Ranks at work at once."
)
@click.option("--quick", is_flag=True, help="Small and short measurements: rough figures.")
@as_json
def bench(output: Path | None, path: Path, world: int | None, quick: bool, json_: bool) -> None:
    """Measure this machine, in seconds.

    Ranks compute at the same time, as in training. `estimate` and `plan` take the file as --machine. Under torchrun its
    ranks measure together, between hosts too, and the first one writes.
    """
    from zerograph.measure import QUICK, is_first, measure

    if output is not None and is_first():
        check_writable(output)
    with progress() as tell:
        machine = measure(path, world, QUICK if quick else None, tell)
    if machine is None:
        return
    if output is not None:
        output.write_text(machine.to_json())
    if json_:
        click.echo(machine.to_json(), nl=False)
    else:
        show_table(rows(machine))
    if output is not None:
        click.echo(f"wrote {output}", err=True)


def rows(machine: Machine) -> list[list[Cell]]:
    """The machine as rows of what, and how much."""
    table = {
        "machine": machine.name,
        "ranks": f"{machine.ranks_per_node} on {machine.device}",
        **{f"matrix products, {dtype}": _flops(rate) for dtype, rate in machine.matmul.items()},
        **{f"attention, {dtype}": _flops(rate) for dtype, rate in machine.attention.items()},
        "memory bandwidth": f"{_si(machine.device_bandwidth, 'B/s')} per rank",
        "smallest operation": f"{machine.launch * 1e6:.3g} us",
        "memory of a rank": format_bytes(machine.device_memory),
        "memory of the host": format_bytes(machine.host_memory),
        "host to device": _link(machine.h2d),
        "device to host": _link(machine.d2h),
        "collectives": _link(machine.intra),
        "collectives between hosts": _link(machine.inter),
        "disk read": _link(machine.nvme_read),
        "disk write": _link(machine.nvme_write),
        "disk free": format_bytes(machine.nvme_capacity),
        "AdamW on the device": f"{_link(machine.update)} per parameter",
        "AdamW on the host": f"{_si(machine.cpu_optimizer, 'B/s')} per node",
        "notes": machine.notes,
    }
    return [[(name, "bold"), value] for name, value in table.items()]


def _link(link: Link) -> str:
    return f"{_si(link.rate, 'B/s')}, {link.latency * 1e6:.3g} us"


def _flops(rate: float) -> str:
    return f"{_si(rate, 'FLOP/s')} per rank"


def _si(number: float, unit: str) -> str:
    """``1.5e9, "B/s"`` as ``"1.5 GB/s"``."""
    for prefix in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number:.3g} T{unit}"
