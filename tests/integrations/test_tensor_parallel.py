"""Which models of transformers are split along an axis. That they then train as whole ones do is in ``numerics``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import fake_world
from torch.distributed.device_mesh import init_device_mesh

from zerograph.core.errors import ConfigError, UnsupportedError
from zerograph.integrations.tensor_parallel import tensor_parallel

transformers = pytest.importorskip("transformers")


def _made(name: str, head: str = "ForCausalLM", **sizes: int) -> Any:
    with torch.device("meta"):
        return getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**sizes))


def test_what_cannot_be_split_is_refused_and_left_as_it_is() -> None:
    small = {"num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64, "hidden_size": 32}
    with fake_world(rank=0, world_size=4):
        mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
        llama = _made("Llama", **small, num_key_value_heads=2)
        with pytest.raises(ConfigError, match="LlamaForCausalLM, \\[4, 2\\], do not divide by the 4 ranks"):
            tensor_parallel(llama, mesh["tp"])
        with pytest.raises(ConfigError, match="a mesh of 2 axes"):
            tensor_parallel(llama, mesh)
        with pytest.raises(ConfigError, match='mesh\\["tp"\\]'):
            tensor_parallel(llama, "tp")  # type: ignore[arg-type]
        with pytest.raises(
            UnsupportedError, match=r"splits model\.layers\.\*\.mlp\.experts.* which ZeroGraph does not"
        ):
            tensor_parallel(_made("Mixtral", **small, num_key_value_heads=4), mesh["tp"])
        with pytest.raises(ConfigError, match="no plan to split GPT2LMHeadModel"):
            tensor_parallel(_made("GPT2", "LMHeadModel", n_layer=1), mesh["tp"])
    assert all(type(p) is torch.nn.Parameter and p.is_meta for p in llama.parameters())
