"""GPUs, the libraries that drive them, and the transports of collectives."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from datetime import timedelta
from pathlib import Path

from zerograph.cli.checks.finding import Finding, first_line
from zerograph.core.units import format_bytes

_DRIVER = Path("/proc/driver/nvidia/version")
_OFTEN = {"CUDA": "pip install --force-reinstall torch  # the wheel of PyPI, or of download.pytorch.org/whl/cu130"}


def cuda() -> Finding:
    """Every CUDA device works: its name, memory and compute capability, and the driver's version."""
    import torch

    driver = driver_version()
    if torch.cuda.is_available():
        return Finding("CUDA", "ok", f"{_devices()}; driver {driver or 'unknown'}, runtime {torch.version.cuda}")
    if driver is None:
        mend = "nothing, if models are to train on the CPU; else install NVIDIA's driver, or docker run --gpus all"
        return Finding("CUDA", "missing", "no NVIDIA driver", mend)
    if torch.version.cuda is None:
        return Finding("CUDA", "missing", f"driver {driver}, but torch {torch.__version__} has no CUDA", _OFTEN["CUDA"])
    return Finding("CUDA", "missing", f"driver {driver}, but {_why_unavailable()}", "nvidia-smi")


def _devices() -> str:
    import torch

    found: dict[str, int] = {}
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        torch.ones(1, device=f"cuda:{index}").item()  # a device may be listed and yet not work
        text = f"{p.name}, {format_bytes(p.total_memory)}, capability {p.major}.{p.minor}"
        found[text] = found.get(text, 0) + 1
    return "; ".join(f"{count} x {text}" for text, count in found.items())


def _why_unavailable() -> str:
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "torch sees no device (CUDA_VISIBLE_DEVICES?)"


def driver_version() -> str | None:
    """Version of NVIDIA's kernel driver; None if there is none."""
    try:
        match = re.search(r"(\d+\.\d+(?:\.\d+)?)", _DRIVER.read_text())
    except OSError:
        return None
    return match[1] if match else "unknown"


def triton() -> Finding:
    """Triton is installed where Inductor needs it: on GPUs."""
    import torch

    if importlib.util.find_spec("triton") is None:
        if torch.cuda.is_available():
            return Finding("Triton", "missing", "not installed; Inductor needs it on GPUs", "pip install triton")
        return Finding("Triton", "missing", "not installed; needed on GPUs only")
    return Finding("Triton", "ok", importlib.metadata.version("triton"))


def nccl() -> Finding:
    """torch was built with NCCL, which carries collectives between GPUs."""
    import torch
    import torch.distributed as dist

    if dist.is_available() and dist.is_nccl_available():
        version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[assignment]
        return Finding("NCCL", "ok", ".".join(map(str, version)))
    if torch.cuda.is_available():
        return Finding("NCCL", "missing", "this torch was built without it", _OFTEN["CUDA"])
    return Finding("NCCL", "missing", "this torch was built without it; needed on GPUs only")


def gloo() -> Finding:
    """gloo, which carries collectives between CPUs, finds a network interface: a group of one rank reduces a tensor."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return Finding("gloo", "missing", "this torch was built without it", "pip install --force-reinstall torch")
    try:
        group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
        group.allreduce([torch.ones(1)]).wait()  # type: ignore[attr-defined]
    except RuntimeError as error:
        return Finding("gloo", "missing", first_line(error), "export GLOO_SOCKET_IFNAME=lo")
    return Finding("gloo", "ok", "a group of one rank works")


def pinned_memory() -> Finding:
    """Pinned host memory, which copies to and from a GPU need to overlap with compute, can be had."""
    import torch

    if not torch.cuda.is_available():
        return Finding("pinned memory", "missing", "needs a CUDA device; needed on GPUs only")
    size = 64 * 2**20
    try:
        torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return Finding("pinned memory", "missing", first_line(error), "ulimit -l unlimited")
    return Finding("pinned memory", "ok", f"{format_bytes(size)} pinned")
