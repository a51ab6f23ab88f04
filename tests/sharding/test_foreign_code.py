"""Other code that meets sharded parameters: each error names the line to write, and that line works."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import llama
from ranks import run
from safetensors.torch import load_file, load_model, save, save_file, save_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toy import differing, full

import zerograph
from zerograph.core.errors import CheckpointError, ShardingError, UnsupportedError


def _sharded() -> nn.Linear:
    model = nn.Linear(4, 6)
    zerograph.shard(model, zerograph.backend())
    return model


def _synchronized_by_hand() -> None:
    """As loops do that average gradients, or send rank 0's weights, themselves."""
    model = _sharded()
    for collective in (
        lambda: dist.broadcast(model.weight.data, 0),
        lambda: dist.all_reduce(model.bias.data),
        lambda: dist.reduce(model.bias.data, 0),
    ):
        with pytest.raises(UnsupportedError, match=r"c10d\.\w+_\.default") as caught:
            collective()
        assert "ZeroGraph starts all from rank 0's values and averages gradients" in caught.value.hint
    rows = model.weight.to_local().detach()
    dist.all_reduce(rows)  # as the hint says
    assert rows.shape == (3, 4)


def _in_anomaly_mode(factor: float) -> str:
    """Multiplies weights, those of rank 1 by ``factor``: the gradient has its value in rows of that rank alone."""
    weight = _sharded().weight
    rows = torch.full((3, 4), factor if dist.get_rank() else 1.0)
    factors = DTensor.from_local(rows, weight.device_mesh, weight.placements, run_check=False)
    try:
        with torch.autograd.set_detect_anomaly(True):
            (weight * factors).to_local().sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_in_anomaly_mode_each_rank_looks_at_its_rows_of_a_gradient() -> None:
    assert run(2, _in_anomaly_mode, 2.0) == ["", ""]
    first, second = run(2, _in_anomaly_mode, math.nan)
    assert first == "" and "'MulBackward0' returned nan values" in second


def _averaged_with_buffers() -> None:
    """As ``AveragedModel(use_buffers=True)`` and timm's ``ModelEmaV3``: all tensors in one call, of which torch has no
    rule for plain ones among DTensors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    plain = copy.deepcopy(model)
    zerograph.shard(model, zerograph.backend())
    averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True) for m in (model, plain)]
    for average, source in zip(averages, (model, plain), strict=True):
        for value in (1.0, 2.0):
            with torch.no_grad():
                for tensor in (*source.parameters(), source[1].running_mean):
                    tensor.mul_(0.5).add_(value)
            average.update_parameters(source)
    assert differing(full(averages[0]), full(averages[1])) == []
    weight, other = model[0].weight, plain[0].weight
    assert not weight.full_tensor().equal(averages[0].module[0].weight.full_tensor())
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"lerp_(?s:.*)got mixed"):
        torch._foreach_lerp_([weight], [other], 0.5)
    with torch.no_grad():  # rows that lie otherwise are moved
        torch._foreach_lerp_([weight], [weight.detach().redistribute(placements=[Replicate()]) + 2], 0.5)
    assert torch.allclose(weight.full_tensor(), other + 1)


def test_averages_move_parameters_and_buffers_in_one_call() -> None:
    run(2, _averaged_with_buffers)


def _wrapped_late() -> None:
    for wrapper in (nn.parallel.DistributedDataParallel, FullyShardedDataParallel):
        with pytest.raises(UnsupportedError, match=f"wrapped by {wrapper.__name__}"):
            wrapper(_sharded())
    around = nn.Sequential(_sharded(), nn.Linear(6, 3))
    with pytest.raises(UnsupportedError, match="wrapped by DistributedDataParallel"):
        nn.parallel.DistributedDataParallel(around)
    ignored = [name for name, _ in around.named_parameters() if name.startswith("0.")]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(around, ignored)
    nn.parallel.DistributedDataParallel(around)


def test_collectives_by_hand_are_refused() -> None:
    run(2, _synchronized_by_hand)


def test_wrappers_around_a_sharded_model_are_refused() -> None:
    run(2, _wrapped_late)


def _language_model(tied: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """A sharded Llama and its weights."""
    torch.manual_seed(0)
    model, _ = llama()
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    values = full(model)
    backend = zerograph.backend(compute="eager")
    zerograph.shard(model, backend)
    model.compile(backend=backend)
    return model, values


def _full(model: nn.Module) -> dict[str, Tensor]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _refused(*lines: Callable[[], Any]) -> None:
    for line in lines:
        with pytest.raises(CheckpointError, match=r"are DTensors, of which each rank holds rows") as caught:
            line()
        assert "embed_tokens.weight for one" in str(caught.value)
        assert "zerograph.gathered(model)" in caught.value.hint and "zerograph.export(model, path)" in caught.value.hint


def _saved(folder: str, tied: bool) -> None:
    model, values = _language_model(tied)
    first = dist.get_rank() == 0
    _refused(
        lambda: model.save_pretrained(f"{folder}/refused"),
        lambda: model.save_pretrained(f"{folder}/refused", is_main_process=first),
        lambda: model.save_pretrained(f"{folder}/refused", state_dict=model.state_dict()),
        lambda: save_model(model, f"{folder}/refused"),
        lambda: save_file(model.state_dict(), f"{folder}/refused"),
        lambda: save(dict(model.named_parameters())),
    )
    assert not Path(folder, "refused").exists()
    with zerograph.gathered(model):
        if first:
            model.save_pretrained(f"{folder}/gathered")
            save_model(model, f"{folder}/model.safetensors")
    model.save_pretrained(f"{folder}/given", state_dict=_full(model), is_main_process=first)
    zerograph.export(model, f"{folder}/exported.safetensors")
    dist.barrier()
    if first:
        kind = type(model)._zg_base
        for path in ("gathered", "given"):
            assert differing(full(kind.from_pretrained(f"{folder}/{path}")), values) == [], path
        for path in ("model", "exported"):
            written = load_file(f"{folder}/{path}.safetensors")
            assert len(written) == len(values) - tied, path
            assert differing(written, {name: values[name] for name in written}) == [], path


def _loaded(path: str) -> None:
    """A file of whole weights into a sharded model; safetensors' own load_model compares memory."""
    model, values = _language_model()
    zerograph.export(model, path)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    with pytest.raises(CheckpointError, match="are DTensors") as caught:
        load_model(model, path)
    assert "model.load_state_dict(safetensors.torch.load_file(path))" in caught.value.hint
    model.load_state_dict(load_file(path))
    assert differing(full(model), values) == []


def _adapter(folder: str) -> None:
    """peft saves by itself, as pickles too, which would take rows without a word."""
    import peft

    torch.manual_seed(0)
    model = peft.get_peft_model(llama()[0], peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    plain = {name: param.detach().clone() for name, param in model.named_parameters() if "lora_" in name}
    zerograph.shard(model, zerograph.backend())
    _refused(
        lambda: model.save_pretrained(f"{folder}/refused"),
        lambda: model.save_pretrained(f"{folder}/refused", safe_serialization=False),
    )
    with zerograph.gathered(model):
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
    dist.barrier()
    written = load_file(f"{folder}/adapter_model.safetensors")
    assert {name.replace(".default", ""): value.shape for name, value in plain.items()} == {
        name: value.shape for name, value in written.items()
    }


@pytest.mark.parametrize("tied", [False, True])
def test_files_of_whole_weights(tied: bool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run(2, _saved, str(tmp_path), tied)


def test_a_file_is_loaded_as_the_error_says(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run(2, _loaded, str(tmp_path / "model.safetensors"))


def test_adapters_of_peft(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run(2, _adapter, str(tmp_path))


def _resized() -> None:
    for tied in (False, True):
        model, values = _language_model(tied)
        for options in ({}, {"mean_resizing": False}):
            with pytest.raises(ShardingError, match="sharded embeddings cannot change their size") as caught:
                model.resize_token_embeddings(80, **options)
            assert "before zerograph.shard" in caught.value.hint
        assert differing(full(model), values) == []
        assert model.config.vocab_size == 64 and isinstance(model.get_input_embeddings().weight, DTensor)
        assert model.resize_token_embeddings(64) is model.get_input_embeddings(), "nothing to do"
    model, _ = llama()
    model.resize_token_embeddings(80)  # as the hint says
    zerograph.shard(model, zerograph.backend())
    assert model.get_input_embeddings().weight.shape == (80, 32)


def _tied_again() -> None:
    model, _ = _language_model(tied=True)
    shared = model.get_parameter("lm_head.weight")
    model.tie_weights()
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight") is shared
    other = nn.Parameter(torch.zeros(64, 32))
    with pytest.raises(ShardingError, match="cannot be replaced"):
        model.lm_head.weight = other


def test_embeddings_are_resized_before_sharding() -> None:
    pytest.importorskip("transformers")
    run(2, _resized)


def test_weights_may_be_tied_again() -> None:
    pytest.importorskip("transformers")
    run(2, _tied_again)
