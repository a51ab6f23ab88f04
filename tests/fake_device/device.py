"""A device that a machine without an accelerator can have: asynchronous, with a memory that the host cannot read.

Its kernels are torch's for a CPU. They run in threads, one for each stream, and late at random, so that whoever reads
what nobody waited for reads not-a-number, and whoever reads the device's memory from the host ends the process. Its
process group runs gloo's collectives in a stream of its own.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import types
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent
LIBRARY = "ZEROGRAPH_FAKE_DEVICE"
"""The environment variable by which processes that are started from here find the library."""
DELAYS = 1
"""The seed by which kernels are late."""
GROUP = "cpu:gloo,fake:fakeccl"
"""The backends of a process group for the host and the device."""


def build() -> Path:
    """The library, made where it was not made from these sources and this torch yet."""
    sources = sorted(HERE.glob("*.cc"))
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for file in sorted([*sources, *HERE.glob("*.h")]):
        digest.update(file.read_bytes())
    room = HERE.parents[1] / "build" / "fake_device"
    room.mkdir(parents=True, exist_ok=True)
    library = room / digest.hexdigest()[:16] / "_fake_device.so"
    with (room / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker of the tests may be at it
        if not library.exists():
            library.parent.mkdir(exist_ok=True)
            _compile(sources, library)
    return library


def _compile(sources: list[Path], library: Path) -> None:
    includes = [TORCH / "include", TORCH / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    flags = ["-O1", "-std=c++20", "-fPIC", "-Wno-attributes", *(f"-I{folder}" for folder in includes)]
    flags += ["-DUSE_DISTRIBUTED", "-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=_fake_device"]
    objects = {source: library.with_name(f"{source.stem}.o") for source in sources}

    def compiled(source: Path) -> None:
        subprocess.run(["g++", *flags, "-c", str(source), "-o", str(objects[source])], check=True)

    with ThreadPoolExecutor(2) as workers:
        list(workers.map(compiled, sources))
    torchs = [f"-L{TORCH}/lib", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", f"-Wl,-rpath,{TORCH}/lib"]
    unfinished = library.with_suffix(".part")
    subprocess.run(["g++", "-shared", *map(str, objects.values()), *torchs, "-o", str(unfinished)], check=True)
    unfinished.rename(library)


@functools.cache
def load() -> Any:
    """Let this process have the device; returns its library. torch then has an accelerator, for as long as the process
    lives.
    """
    os.environ.setdefault(LIBRARY, str(build()))
    spec = importlib.util.spec_from_file_location("_fake_device", os.environ[LIBRARY])
    assert spec is not None
    assert spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    library.delay(DELAYS)
    torch.utils.rename_privateuse1_backend("fake")
    torch._register_device_module("fake", _module(library))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

    def group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return library.group_over(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend("fakeccl", group, devices=["fake"])
    return library


def _snapshot(library: Any) -> dict[str, Any]:
    """Its memory as ``torch.cuda.memory._snapshot`` tells it, without the places of the code that took it."""
    trace = [
        {
            "action": action, "addr": each.address, "size": each.size, "stream": each.stream,
            "time_us": each.microseconds, "frames": [],
        }
        for each in library.history()
        for action in (["alloc"] if each.taken else ["free_requested", "free_completed"])
    ]  # fmt: skip
    blocks = [
        {
            "address": piece.address, "size": piece.size, "requested_size": piece.size, "frames": [],
            "state": "active_allocated" if piece.used else "inactive",
        }
        for piece in library.pieces()
    ]  # fmt: skip
    sizes = {"total_size": sum(b["size"] for b in blocks), "allocated_size": library.held()}
    start = blocks[0]["address"] if blocks else 0
    segment = {"device": 0, "address": start, "stream": 0, "segment_type": "large", "blocks": blocks, **sizes}
    return {"segments": [segment], "device_traces": [trace]}


def _module(library: Any) -> types.ModuleType:
    """What torch asks of ``torch.fake``."""
    module: Any = types.ModuleType("torch.fake")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count, module.current_device = lambda: 1, lambda: 0
    module.set_device = lambda _: None
    module.memory_allocated = lambda *_: library.held()
    module.memory = types.SimpleNamespace(
        _record_memory_history=lambda enabled="all", **_: library.keep_history(enabled is not None),
        _snapshot=lambda *_: _snapshot(library),
    )
    module.synchronize = lambda *_: library.synchronize()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    generator = library.default_generator()
    module.get_rng_state = lambda *_: generator.get_state()
    module.set_rng_state = lambda state, *_: generator.set_state(state)
    module.manual_seed = module.manual_seed_all = library.manual_seed
    module.cudart = lambda: types.SimpleNamespace(
        cudaHostRegister=lambda at, size, _: library.pin(at, size) or 0, cudaHostUnregister=library.unpin
    )
    module.current_stream = torch.accelerator.current_stream
    module.stream = lambda stream: stream  # which is a context itself
    return module
