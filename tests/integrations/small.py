"""A tiny language model, its data, and what tests of all integrations ask of it."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

transformers = pytest.importorskip("transformers", reason="the optional extra transformers is not installed")

VOCABULARY = 67


def llama() -> Any:
    """One layer, as depth is nothing that these libraries see; tied embeddings, the same values on every call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, num_key_value_heads=1, tie_word_embeddings=True, bos_token_id=None, **sizes
    )
    return transformers.LlamaForCausalLM(config)


def texts(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    rows = torch.randint(0, VOCABULARY, (count, 9), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in rows]


def quiet() -> None:
    """Forget what another test told Accelerate, whose state is one per process, and keep libraries from talking."""
    from accelerate.state import AcceleratorState, GradientState

    if "WORLD_SIZE" in os.environ:  # what torchrun sets besides
        os.environ |= {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"], "MASTER_ADDR": "localhost"}
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    logging.getLogger("lightning").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def unsharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Parameters with rows for every rank that this rank holds more of than its own; also of gradients and states."""
    world, found = dist.get_world_size(), []
    for name, param in model.named_parameters():
        held = {"": param, " grad": param.grad}
        held |= {f" {k}": v for k, v in optimizer.state.get(param, {}).items() if v.shape == param.shape}
        for what, value in held.items():
            if value is not None and param.shape[0] >= world and not _split(value):
                found.append(name + what)
    return found


def _split(value: Tensor) -> bool:
    return isinstance(value, DTensor) and value.placements == (Shard(0),) and value.to_local().shape != value.shape


def generated(model: Any, stops: bool = False) -> list[int]:
    """Another prompt on each rank; with ``stops``, ranks are done after different numbers of tokens."""
    rank = dist.get_rank()
    ids = torch.arange(3)[None] + 1 + 3 * rank
    limit = {"max_new_tokens": 2 + 3 * rank} if stops else {"max_new_tokens": 4}
    return model.generate(ids, do_sample=False, pad_token_id=0, eos_token_id=None, **limit)[0].tolist()


def plain(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors that can travel between processes."""
    full = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in values.items()}
    return {n: v.detach().clone() for n, v in full.items()}


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)
