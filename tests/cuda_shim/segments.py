"""The kernels that a GPU would run in a training step; for `server.py`."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable
from typing import Any

import pretend
import torch
from torch import Tensor, nn
from torch._inductor.graph import GraphLowering
from triton import knobs

from zerograph.dryrun.compile_only import compile_only

ASSEMBLED = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads", re.DOTALL
)
SMALL = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama() -> nn.Module:
    import transformers

    sizes = {**SMALL, "intermediate_size": 256, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False))


def gpt2() -> nn.Module:
    import transformers

    sizes = {"vocab_size": 512, "n_positions": 128, "n_embd": 128, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else it warns, which Dynamo does not compile
    return model


def t5() -> nn.Module:
    import transformers

    sizes = {"vocab_size": 512, "d_model": 128, "d_kv": 64, "d_ff": 256, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)
    return transformers.T5ForConditionalGeneration(config)


def mixtral() -> nn.Module:
    import transformers

    sizes = {**SMALL, "intermediate_size": 128, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **experts, use_cache=False))


def vit() -> nn.Module:
    import transformers

    sizes = {k: v for k, v in SMALL.items() if k != "vocab_size"} | {"intermediate_size": 256}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=8)
    return transformers.ViTForImageClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama, "gpt2": gpt2, "t5": t5, "mixtral": mixtral, "vit": vit,
}  # fmt: skip


def batch(name: str) -> dict[str, Tensor]:
    if name == "vit":
        return {"pixel_values": torch.empty(2, 3, 32, 32), "labels": torch.zeros(2, dtype=torch.int64)}
    ids = torch.zeros(2, 128, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def main(name: str, capability: list[int], options: dict[str, Any], alike: list[dict[str, Any]]) -> dict[str, Any]:
    """What is compiled of a model.

    Args:
        name: of the model.
        capability: of the device.
        options: of ``compile_only``.
        alike: others of them, which are to change no segment.
    """
    pretend.pretend((capability[0], capability[1]))

    def compiled(**more: Any) -> list[list[str]]:
        given = {"world_size": 4, "device": "cuda:0", "dtype": torch.bfloat16, "bucket_size": "1MB", **options, **more}
        found = compile_only(lambda: (MODELS[name](), batch(name)), **given)
        return [[s.digest for s in found.frame.programs[kind].segments] for kind in ("forward", "backward")]

    knobs.nvidia.dump_ptxas_log = True
    sources, log = list[str](), io.StringIO()
    GraphLowering.save_output_code = sources.append  # type: ignore[assignment]
    with contextlib.redirect_stdout(log):
        digests = compiled(stage=3, compute="inductor")
        others = [compiled(**other) for other in alike]
    spilled: dict[str, int] = {}
    for kernel, stores, loads in ASSEMBLED.findall(log.getvalue()):
        # The autotuner takes a configuration that spills nothing, where there is one.
        spilled[kernel] = min(spilled.get(kernel, sys.maxsize), int(stores) + int(loads))
    return {
        "segments": [_calls(source) for source in sources],
        "spilled": spilled,
        "alike": all(other == digests for other in others),
    }


def _calls(source: str) -> dict[str, list[str]]:
    """The calls of a segment's code: Triton's kernels, libraries' products, and operators of torch that stay."""
    return {
        "triton": re.findall(r"(\w+)\.run\(", source),
        "products": re.findall(r"extern_kernels\.(\w+)\(", source),
        "operators": re.findall(r"torch\.ops\.aten\.([\w.]+)\(", source),
    }
