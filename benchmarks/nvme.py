"""Bare file I/O: both engines of the core against fio, and against DeepSpeed's engine where that is installed.

    python benchmarks/nvme.py --directory DIR [--bytes 1073741824] [--repeats 5] [--blocks 1 8] [--depths 8 32 128]

Every variant reads and writes the whole size past the page cache, from memory on 2 MiB pages, with the same block size
(MiB) and depth. The variants take turns, and each repeat's ratio is to fio in the same repeat, so that a disk whose
speed drifts does not decide. GB/s and ratios are medians, with the quartiles of the ratio; CPU seconds per GiB are
this process's, kernel included (fio's are its own account).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from facts import Load, append_json, describe, machine_facts, version

import zerograph._core as _core
from zerograph._core import Direction, IoEngine, Priority, Slab
from zerograph.runtime.offload.nvme import huge_tensor

MIB, GIB = 2**20, 2**30
Run = Callable[[str], tuple[float, float]]
"""Moves everything once, "read" or "write"; seconds of wall time and of CPU."""


@dataclass(frozen=True, slots=True)
class Case:
    directory: Path
    size: int
    block: int
    depth: int


def ours(name: str, case: Case, slab: Slab, memory: torch.Tensor) -> Run:
    """Threads: as many as fio has in flight, up to 16, beyond which more only cost memory."""
    engine = IoEngine(name, depth=case.depth, threads=min(case.depth, 16), block=case.block)
    file = engine.attach(slab.fd, slab.path, slab.memory_alignment, slab.offset_alignment)
    engine.register_memory(memory.data_ptr(), case.size)

    def run(verb: str) -> tuple[float, float]:
        part = [(file, 0, memory.data_ptr(), case.size, False)]
        begin, cpu = time.perf_counter(), time.process_time()
        engine.wait(engine.submit(getattr(Direction, verb), part, Priority.soon))
        return time.perf_counter() - begin, time.process_time() - cpu

    return run


def fio(case: Case) -> Run:
    path = case.directory / "zerograph-bench.fio"
    huge = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # buffers on 2 MiB pages, none reserved for it

    def run(verb: str) -> tuple[float, float]:
        command = [
            "fio", "--name=bench", f"--filename={path}", f"--size={case.size}", f"--rw={verb}", f"--bs={case.block}",
            f"--iodepth={case.depth}", "--ioengine=io_uring", "--direct=1", "--overwrite=1", "--output-format=json",
            "--end_fsync=0", "--fallocate=posix", "--mem=malloc", "--iomem_align=2M",
        ]  # fmt: skip
        job = json.loads(subprocess.run(command, env=huge, capture_output=True, text=True, check=True).stdout)["jobs"][
            0
        ]
        seconds = case.size / job[verb]["bw_bytes"]
        return seconds, (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds

    return run


def deepspeed(case: Case, memory: torch.Tensor) -> Run:
    """Its `read` and `write`, which use the caller's memory; `sync_pread` and `async_pread` copy what they have not
    allocated themselves. It compiles its engine when it is first used, against libaio."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = AsyncIOBuilder().load(verbose=False).aio_handle(case.block, case.depth, False, True, 1)
    path, tensor = str(case.directory / "zerograph-bench.ds"), memory[: case.size]

    def run(verb: str) -> tuple[float, float]:
        with silent():
            begin, cpu = time.perf_counter(), time.process_time()
            done = getattr(handle, verb)(tensor, path, False, 0)
            taken = time.perf_counter() - begin, time.process_time() - cpu
        if done < 0:
            raise OSError(f"DeepSpeed's {verb} of {path} failed")
        return taken

    return run


@contextmanager
def silent() -> Iterator[None]:
    """Without what C++ prints: DeepSpeed says how long each transfer took."""
    sys.stdout.flush()
    kept, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nothing)


def absent() -> dict[str, str]:
    """The variants that this machine does not have, and why; one that is there and fails is an error."""
    reasons = {
        "fio": None if shutil.which("fio") else "fio is not installed",
        "deepspeed": None if version("deepspeed") else "DeepSpeed is not installed",
        "uring": None if _core.has_uring() and _core.probe_uring() == 0 else "there is no io_uring (zerograph doctor)",
    }
    return {name: reason for name, reason in reasons.items() if reason is not None}


def measure(case: Case, slab: Slab, memory: torch.Tensor, repeats: int) -> list[dict[str, object]]:
    make: dict[str, Callable[[], Run]] = {
        "fio": lambda: fio(case),
        "deepspeed": lambda: deepspeed(case, memory),
        "threads": lambda: ours("threads", case, slab, memory),
        "uring": lambda: ours("uring", case, slab, memory),
    }
    found = {name: build() for name, build in make.items() if name not in absent()}
    samples: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for repeat in range(repeats + 1):  # the first writes the files, and is not counted
        for verb in ("write", "read"):
            order = list(found.items())
            for name, run in order[repeat % len(order) :] + order[: repeat % len(order)]:
                sample = run(verb)
                if repeat:
                    samples.setdefault((verb, name), []).append(sample)
    return [row(case, verb, name, taken, samples) for (verb, name), taken in samples.items()]


def row(
    case: Case,
    verb: str,
    name: str,
    taken: list[tuple[float, float]],
    all_: dict[tuple[str, str], list[tuple[float, float]]],
) -> dict[str, object]:
    out: dict[str, object] = {"verb": verb, "block": case.block // MIB, "depth": case.depth, "variant": name}
    out["rate"] = case.size / statistics.median(t for t, _ in taken) / 1e9
    out["cpu"] = statistics.median(c for _, c in taken) / (case.size / GIB)
    for other in ("fio", "deepspeed"):
        if (verb, other) in all_ and other != name:
            ratios = [b[0] / a[0] for a, b in zip(taken, all_[verb, other], strict=True)]
            out[other] = [quantile(ratios, q) for q in (0.25, 0.5, 0.75)]
    return out


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


def show(found: dict[str, object]) -> str:
    def ratio(other: str) -> str:
        if other not in found:
            return ""
        low, middle, high = found[other]  # type: ignore[misc]
        return f"{middle:.2f} ({low:.2f} to {high:.2f})"

    cells = [found["verb"], found["block"], found["depth"], found["variant"], f"{found['rate']:.2f}"]
    return "| " + " | ".join(str(c) for c in [*cells, ratio("fio"), ratio("deepspeed"), f"{found['cpu']:.3f}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--bytes", type=int, default=GIB)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    options = parser.parse_args()
    directory = options.directory.resolve()
    slab, memory = Slab(str(directory), options.bytes), huge_tensor(options.bytes)
    memory.view(torch.int64).random_()
    facts, load = machine_facts("cpu"), Load()
    print(describe(facts))
    for reason in absent().values():
        print(f"{reason}: not compared with")
    print("| | block MiB | depth | engine | GB/s | of fio | of DeepSpeed | CPU s/GiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    try:
        for block in options.blocks:
            for depth in options.depths:
                case = Case(directory, options.bytes, block * MIB, depth)
                load.start()
                cpu = time.process_time()
                rows = measure(case, slab, memory, options.repeats)
                load.stop(time.process_time() - cpu)
                for found in sorted(rows, key=lambda r: str(r["verb"])):
                    print(show(found), flush=True)
                    if options.json:
                        append_json(options.json, {"benchmark": "nvme", **facts, **found})
    finally:
        for path in directory.glob("zerograph-bench.*"):
            path.unlink()
    print(f"other processes (fio among them) took {load.share:.0%} of the machine")


if __name__ == "__main__":
    main()
