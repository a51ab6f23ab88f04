"""Patches of a torch without CUDA, so that Inductor generates Triton kernels for a GPU and Triton assembles them.

`shim.cc` beside this file answers where C++ asks; here are the answers to Python. Nothing can run: every kernel ends as
a cubin, and a launch does nothing. It is for processes of their own, which do nothing else.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.backends
from torch._dynamo import device_interface
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import joint_graph, post_grad
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver

_FACTS = {
    (8, 0): ("NVIDIA A100-SXM4-80GB", 108, 166912, 167936, 40),
    (9, 0): ("NVIDIA H100 80GB HBM3", 132, 232448, 233472, 50),
}
"""By capability: name, multiprocessors, bytes of shared memory for a block and on one of these, MiB of the cache."""


def pretend(capability: tuple[int, int]) -> None:
    """From now on a GPU of that compute capability is current: the one that `shim.cc` says is."""
    name, processors, of_block, of_processor, cache = _FACTS[capability]
    major, minor = capability
    facts = types.SimpleNamespace(
        name=name, type="cuda", index=int(os.environ.get("SHIM_DEVICE", "0")), major=major, minor=minor,
        multi_processor_count=processors, warp_size=32,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
        total_memory=80 * 2**30, shared_memory_per_block=49152, shared_memory_per_block_optin=of_block,
        shared_memory_per_multiprocessor=of_processor, L2_cache_size=cache * 2**20, gcnArchName="", is_integrated=0,
        clock_rate=1_980_000, memory_clock_rate=2_619_000, memory_bus_width=5120, uuid="0", pci_bus_id=0,
    )  # fmt: skip
    _patch_torch(facts)
    _patch_triton(facts)
    _patch_inductor()


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _patch_torch(facts: types.SimpleNamespace) -> None:
    capability = facts.major, facts.minor
    answers = {
        "_lazy_init": None, "is_available": True, "is_initialized": True, "_is_compiled": True,
        "device_count": facts.index + 1, "current_device": facts.index, "set_device": None, "synchronize": None,
        "_exchange_device": facts.index, "_maybe_exchange_device": facts.index,
        "get_device_properties": facts, "get_device_capability": capability,
        "get_device_name": facts.name, "get_arch_list": [f"sm_{facts.major}{facts.minor}"],
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None, "memory_reserved": 0,
        "mem_get_info": (facts.total_memory, facts.total_memory),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, _always(answer))
    torch.cuda.default_generators = (torch.default_generator,)
    torch.version.cuda = "13.0"
    for name in ("getCurrentRawStream", "getCurrentBlasHandle"):
        setattr(torch._C, f"_cuda_{name}", _always(0))
    for name in ("getDevice", "exchangeDevice", "maybeExchangeDevice"):
        setattr(torch._C, f"_cuda_{name}", _always(facts.index))
    torch._C._cuda_setDevice = _always(None)
    interface = device_interface.CudaInterface
    of_interface = {
        "is_available": True, "get_raw_stream": 0, "current_device": facts.index,
        "device_count": facts.index + 1, "synchronize": None,
        "get_device_properties": facts, "get_compute_capability": 10 * facts.major + facts.minor,
        "exchange_device": facts.index, "maybe_exchange_device": facts.index,
        "is_bf16_supported": True, "is_triton_capable": True, "raise_if_triton_unavailable": None,
    }  # fmt: skip
    for name, answer in of_interface.items():
        setattr(interface, name, staticmethod(_always(answer)))
    for name, answer in {"get_device_properties": facts, "current_device": facts.index, "set_device": None}.items():
        setattr(interface.Worker, name, staticmethod(_always(answer)))
    for device in ("cuda", f"cuda:{facts.index}"):
        device_interface.register_interface_for_device(device, interface)


class _Utils:
    """Triton's functions for a device, in C++ elsewhere."""

    def __init__(self, facts: types.SimpleNamespace) -> None:
        self._facts = facts

    def load_binary(self, *_: object) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills and threads of a kernel; ptxas tells the true ones."""
        return 1, 2, 32, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._facts.shared_memory_per_block_optin, "max_num_regs": 65536, "warpSize": 32,
            "multiprocessor_count": self._facts.multi_processor_count, "sm_clock_rate": 1, "mem_clock_rate": 1,
            "mem_bus_width": 1,
        }  # fmt: skip

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _always(None)


def _patch_triton(facts: types.SimpleNamespace) -> None:
    target = GPUTarget("cuda", 10 * facts.major + facts.minor, 32)

    class Driver:
        utils = _Utils(facts)
        binary_ext = "cubin"
        launcher_cls = staticmethod(_always(_always(None)))
        get_current_target = staticmethod(_always(target))
        get_current_device = get_device = staticmethod(_always(facts.index))
        get_current_stream = staticmethod(_always(0))
        set_current_device = assemble_tensormap_to_arg = clear_cache = staticmethod(_always(None))
        get_active_torch_device = staticmethod(_always(torch.device("cuda", facts.index)))
        get_device_interface = staticmethod(_always(torch.cuda))
        get_device_capability = staticmethod(_always((facts.major, facts.minor)))
        get_benchmarker = staticmethod(_always(_always([0.1])))
        get_empty_cache_for_benchmark = staticmethod(_always(None))
        map_python_to_cpp_type = CudaDriver.map_python_to_cpp_type
        is_active = staticmethod(_always(True))

    triton.runtime.driver.set_active(Driver())  # type: ignore[no-untyped-call]
    nvidia = triton.backends.backends["nvidia"]
    triton.backends.backends["nvidia"] = type(nvidia)(nvidia.compiler, Driver)  # type: ignore[arg-type]


def _patch_inductor() -> None:
    """Passes register their patterns by tracing these, which no operator of a GPU is here for."""
    for name in ("use_static_cuda_launcher", "use_static_triton_launcher"):
        if hasattr(inductor_config, name):
            setattr(inductor_config, name, False)
    inductor_config.joint_graph_constant_folding = False
    inductor_config.shape_padding = False  # decided by timing
    for module in (joint_graph, post_grad):
        module.lazy_init = _on_cpu(module.lazy_init)  # type: ignore[attr-defined]


def _on_cpu(initialize: Callable[..., None]) -> Callable[..., None]:
    def initialized(*_: object) -> None:
        there, torch.cuda.is_available = torch.cuda.is_available, _always(False)
        try:
            initialize(torch.device("cpu"))
        finally:
            torch.cuda.is_available = there

    return initialized
