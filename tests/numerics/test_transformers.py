"""Models of the transformers library, small and random, unchanged: training losses and ``generate``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from numerics.compare import Result, check, full_values, mean_over_ranks, mine, seeded, sgd, snapshot
from ranks import run
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerograph

transformers = pytest.importorskip("transformers", reason="the optional extra transformers is not installed")

SMALL = {"vocab_size": 67, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
ROWS = 2


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=1))


def gpt2() -> nn.Module:
    sizes = {"vocab_size": 67, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))


def bert() -> nn.Module:
    config = transformers.BertConfig(
        **SMALL, max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    sizes = {"vocab_size": 67, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def vit() -> nn.Module:
    small = {k: v for k, v in SMALL.items() if k != "vocab_size"}
    config = transformers.ViTConfig(
        **small, image_size=8, patch_size=4, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.ViTForImageClassification(config)


def batch(name: str, step: int) -> dict[str, Tensor]:
    rows, generator = ROWS * dist.get_world_size(), seeded(step)
    if name == "vit":
        pixels = torch.randn(rows, 3, 8, 8, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 5, (rows,), generator=generator)}
    ids = torch.randint(1, 67, (rows, 9), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _train(make: Callable[[], nn.Module], how: int | str | None, compute: str = "eager", tile: Any = "auto") -> Result:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = make().train()
    model: nn.Module = module
    if how == "DDP":
        model = DistributedDataParallel(module)
    elif how == "fully_shard":
        for part in (*module.model.layers, module):
            fully_shard(part)
    elif how is not None:
        module.compile(backend=zerograph.backend(stage=how, compute=compute, bucket_size="4KB", tile=tile))
    optimizer = sgd(module)
    losses = []
    for step in range(3):
        inputs = batch(make.__name__, step)
        if how is not None:
            inputs = dict(zip(inputs, mine(list(inputs.values())), strict=True))
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss if how is None else mean_over_ranks(loss)).item())
    return Result(losses, full_values(module))


def _trains(make: Callable[[], nn.Module], stages: tuple[int, ...]) -> dict[int | None, Result]:
    return {stage: _train(make, stage) for stage in (None, *stages)}


@pytest.mark.parametrize("make", [gpt2, bert, t5, mixtral, vit], ids=lambda make: make.__name__)
def test_trains_like_plain_pytorch(make: Callable[[], nn.Module]) -> None:
    """At stage 3; a tied model at all that shard."""
    check(run(2, _trains, make, (1, 2, 3) if make is bert else (3,))[0], rel=2e-5, atol=2e-5)


def _in_tiles(tile: dict[str, int]) -> dict[int | None, Result]:
    return {None: _train(gpt2, None), 3: _train(gpt2, 3, tile=tile)}


@pytest.mark.slow
@pytest.mark.parametrize("tile", [{"*.mlp.*": 4}, {"*": 3}], ids=["mlp", "all"])
def test_gpt2_trains_in_tiles_like_plain_pytorch(tile: dict[str, int]) -> None:
    """Weights of ``Conv1D``, whose rows are inputs, positions, and words, which the head has too."""
    check(run(2, _in_tiles, tile)[0], rel=2e-5, atol=2e-5)


def _compiled() -> dict[int | str | None, Result]:
    return {how: _train(llama, how, "inductor") for how in (None, "DDP", "fully_shard", 3)}


def test_compiled_by_inductor_it_trains_like_plain_pytorch_ddp_and_fully_shard() -> None:
    results = run(2, _compiled)[0]
    for theirs in (None, "DDP", "fully_shard"):
        check({None: results[theirs], 3: results[3]}, rel=2e-5, atol=2e-5)


def _generates(make: Callable[[], nn.Module]) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    module = make().eval()
    plain = snapshot(module)
    module.compile(backend=zerograph.backend(stage=3, compute="eager"))
    ids = torch.arange(6).view(2, 3) + 1
    module(input_ids=ids)
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return module.generate(ids, **how).tolist(), plain.generate(ids, **how).tolist()


@pytest.mark.slow
def test_generates_after_sharding() -> None:
    for ours, plain in run(2, _generates, llama):
        assert ours == plain
