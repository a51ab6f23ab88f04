"""Accelerate: the same loop under DDP and sharded, its checkpoints at other world sizes, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

import zerograph
from zerograph.core.errors import ConfigError, UnsupportedError

accelerate = pytest.importorskip("accelerate", reason="the optional extra accelerate is not installed")

from accelerate import ParallelismConfig  # noqa: E402
from integrations.small import close, generated, llama, plain, quiet, texts, unsharded  # noqa: E402

from zerograph.integrations.accelerate import Accelerator  # noqa: E402


class Run:
    """A user's loop: accumulation over two micro-batches, clipping, a scheduler. ``stage`` None is Accelerate's DDP."""

    def __init__(self, stage: int | None, keep: str = "SHARDED_STATE_DICT", rows: int = 0, **options: Any) -> None:
        quiet()
        options |= {"cpu": True, "gradient_accumulation_steps": 2}
        options["step_scheduler_with_optimizer"] = False  # Accelerate would step it once per process
        if stage is None:
            self.accelerator = accelerate.Accelerator(**options)
        else:
            backend = zerograph.backend(stage=stage, compute="eager")
            self.accelerator = Accelerator(backend=backend, state_dict_type=keep, **options)
        model = llama()
        config = options.get("parallelism_config")
        if config is not None and config.tp_size > 1:
            plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
            parallelize_module(model.model.layers[0].mlp, self.accelerator.torch_device_mesh["tp"], plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        loader = DataLoader(texts(32), batch_size=rows or 4 // dist.get_world_size())
        prepared = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        self.held: list[str] = []

    def train(self, batches: range) -> list[tuple[float, float]]:
        """Loss over all ranks and norm of each update."""
        found, losses = [], []
        for index, batch in enumerate(self.loader):
            if index not in batches:
                continue
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch, use_cache=False).loss
                self.accelerator.backward(loss)
                losses.append(self.accelerator.reduce(loss.detach(), "mean").item())
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    found.append((sum(losses) / len(losses), float(norm)))
                    losses.clear()
                self.optimizer.step()
                if self.accelerator.sync_gradients:
                    self.held += unsharded(self.accelerator.unwrap_model(self.model), self.optimizer.optimizer)
                    self.scheduler.step()
                self.optimizer.zero_grad()
        return found


def _train(path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stage in (None, 1, 3):
        ours = Run(stage)
        curve = ours.train(range(4))
        if stage is not None:
            ours.accelerator.save_state(f"{path}/{stage}")
        model = ours.accelerator.unwrap_model(ours.model)
        text = generated(model, stops=True) if stage != 1 else []
        model.eval()
        with torch.no_grad():
            evaluated = model(**next(iter(ours.loader))).loss
        model.train()
        curve += ours.train(range(4, 8))
        if stage == 3:
            full = ours.accelerator.get_state_dict(ours.model)
            model.save_pretrained(f"{path}/exported", is_main_process=ours.accelerator.is_main_process, state_dict=full)
            ours.accelerator.save_model(ours.model, f"{path}/weights")
        weights = plain(model.state_dict())
        found[str(stage)] = {"curve": curve, "text": text, "evaluated": evaluated.item(), "weights": weights}
        found[str(stage)] |= {"held": ours.held, "type": type(ours.model).__name__}
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    path = str(tmp_path_factory.mktemp("accelerate"))
    return path, run(2, _train, path)


def _same_curve(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> None:
    assert [v for pair in ours for v in pair] == pytest.approx([v for pair in theirs for v in pair], rel=2e-5)


@pytest.mark.parametrize("stage", ["1", "3"])
def test_losses_norms_and_weights_are_those_under_ddp(trained: Any, stage: str) -> None:
    """At stage 1 micro-batches are held back, at stage 3 each is reduced."""
    for rank in trained[1]:
        ours, ddp = rank[stage], rank["None"]
        _same_curve(ours["curve"], ddp["curve"])
        close(ours["weights"], ddp["weights"])
        assert ours["evaluated"] == pytest.approx(ddp["evaluated"], rel=2e-5)
        assert rank["3"]["text"] == ddp["text"]


def test_parameters_gradients_and_states_are_sharded_and_nothing_wraps_the_model(trained: Any) -> None:
    for rank in trained[1]:
        assert rank["None"]["held"]
        assert rank["3"]["held"] == []
        assert rank["3"]["type"] == "LlamaForCausalLM"


def test_exports_are_plain_files(trained: Any) -> None:
    import transformers
    from safetensors.torch import load_file

    path, ranks = trained
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{path}/exported")
    close(plain(model.state_dict()), ranks[0]["3"]["weights"])
    files = load_file(f"{path}/weights/model.safetensors")
    close(files, {n: v for n, v in ranks[0]["3"]["weights"].items() if n in files})


def _resume(path: str) -> list[tuple[float, float]]:
    ours = Run(3)
    ours.accelerator.load_state(path)
    return ours.train(range(4, 8))


@pytest.mark.parametrize("world", [1, 4])
def test_save_state_resumes_at_another_world_size(trained: Any, world: int) -> None:
    path, ranks = trained
    _same_curve(run(world, _resume, f"{path}/3")[0], ranks[0]["None"]["curve"][2:])


def _full(path: str) -> list[tuple[float, float]]:
    ours = Run(3, "FULL_STATE_DICT")
    if not Path(path).exists():
        ours.train(range(4))
        ours.accelerator.save_state(path)
        assert {p.name for p in Path(path).iterdir()} > {"optimizer.bin", "pytorch_model_fsdp.bin"}
    else:
        ours.accelerator.load_state(path)
    return ours.train(range(4, 8))


@pytest.mark.slow
def test_full_checkpoints_of_one_rank_resume_on_two(trained: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "full")
    run(1, _full, path)
    _same_curve(run(2, _full, path)[0], trained[1][0]["None"]["curve"][2:])


def _refused() -> None:
    backend = zerograph.backend(stage=1, compute="eager")
    for options, named in [
        ({"dynamo_backend": "zerograph"}, "closed list"),
        ({"dynamo_backend": "inductor"}, "dynamo backend INDUCTOR"),
        ({"kwargs_handlers": [accelerate.DistributedDataParallelKwargs()]}, "DistributedDataParallelKwargs"),
        ({"fsdp_plugin": accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)}, "fsdp_plugin"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "state_dict_type must be"),
        ({"backend": zerograph.backend}, "Accelerator got function in the place of a Backend"),
    ]:
        quiet()
        with pytest.raises(ConfigError, match=named):
            Accelerator(**{"backend": backend, "cpu": True, **options})
    ours = Run(1)
    with (
        pytest.raises(UnsupportedError, match="trigger_sync_in_backward"),
        ours.accelerator.trigger_sync_in_backward(ours.model),
    ):
        pass


HSDP = {"dp_replicate_size": 2, "dp_shard_size": 2}


def _on_axes(path: str) -> dict[str, Any]:
    found = {}
    for name, stage, options in (("ddp", None, {}), ("hsdp", 3, {"parallelism_config": ParallelismConfig(**HSDP)})):
        ours = Run(stage, **options)
        curve = ours.train(range(4))
        if stage is not None:
            ours.accelerator.save_state(path)
            mesh = zerograph.backend_of(ours.model).config.mesh
            assert mesh is not None and (mesh.mesh_dim_names, tuple(mesh.shape)) == (
                ("dp_replicate", "dp_shard"),
                (2, 2),
            )
            halves = [(len(p.to_local()), p.shape[0] / 2) for p in ours.model.parameters()]
            assert all(abs(own - half) < 1 for own, half in halves), "split over two of four ranks"
            resumed = Run(stage, parallelism_config=ParallelismConfig(**HSDP))
            resumed.accelerator.load_state(path)
            ours = resumed
        curve += ours.train(range(4, 8))
        found[name] = curve
    return found


def test_axes_of_a_parallelism_config_shard_and_replicate(tmp_path: Path) -> None:
    for rank in run(4, _on_axes, str(tmp_path)):
        _same_curve(rank["hsdp"], rank["ddp"])


def _tensor_parallel(path: str) -> list[tuple[float, float]]:
    options = {"parallelism_config": ParallelismConfig(dp_shard_size=2, tp_size=2)}
    ours = Run(3, rows=2, **options)
    curve = ours.train(range(4))
    ours.accelerator.save_state(path)
    up = ours.accelerator.unwrap_model(ours.model).model.layers[0].mlp.up_proj.weight
    assert up.device_mesh.mesh_dim_names == ("dp_shard", "tp") and len(up.to_local()) * 4 == len(up)
    resumed = Run(3, rows=2, **options)
    resumed.accelerator.load_state(path)
    with pytest.raises(ConfigError, match="tp_size=2 was given, and LlamaForCausalLM is not parallel"):
        resumed.accelerator.prepare(llama())
    return curve + resumed.train(range(4, 8))


def test_tensor_parallelism_of_a_parallelism_config(trained: Any, tmp_path: Path) -> None:
    for curve in run(4, _tensor_parallel, str(tmp_path)):
        _same_curve(curve, trained[1][0]["None"]["curve"])


def _axes_refused() -> None:
    both = {"parallelism_config": ParallelismConfig(dp_shard_size=2)}
    mesh = init_device_mesh("cpu", (2,))
    for options, named in (
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, "tp_size=2 and nothing to shard over"),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, "parallelism_config has cp_size=2"),
        ({"parallelism_config": ParallelismConfig(dp_replicate_size=2)}, "nothing to shard over"),
        ({**both, "backend": zerograph.backend(stage=3, mesh=mesh)}, "which ranks shard would be said twice"),
    ):
        quiet()
        with pytest.raises(ConfigError, match=named):
            Accelerator(**{"backend": zerograph.backend(stage=3), "cpu": True, **options})


def test_axes_that_cannot_be_are_refused_and_the_others_named() -> None:
    run(2, _axes_refused)


class Generating(torch.nn.Sequential):
    """With a ``generate`` of its own, as models outside of transformers have it."""

    def generate(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = self(x)
        return x


def _sequential() -> list[bool]:
    quiet()
    backend = zerograph.backend(stage=3, compute="eager")
    accelerator = Accelerator(backend=backend, cpu=True)
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)))
    accelerator.backward(model(torch.ones(3, 4)).sum())
    own = accelerator.prepare(Generating(torch.nn.Linear(4, 4)))
    assert own.generate(torch.ones(4), 2).shape == (4,)
    return [bool(backend.program), all(p.grad.to_local().shape[0] * 2 == p.shape[0] for p in model.parameters())]


def test_models_of_torch_nn_are_compiled_too() -> None:
    """``module.compile()`` does nothing for those, in silence."""
    assert run(2, _sequential) == [[True, True]] * 2


def _copied() -> None:
    quiet()
    accelerator = Accelerator(backend=zerograph.backend(stage=3, compute="eager"), cpu=True)
    x, ids = torch.ones(3, 4), torch.tensor([[1, 2, 3]])
    for made in (torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)), llama()):
        model = accelerator.prepare(made)
        target = copy.deepcopy(model)
        with torch.no_grad():
            for param in target.parameters():
                param.zero_()
        if isinstance(made, torch.nn.Sequential):
            assert model(x).any() and not target(x).any()
        else:
            both = [m.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)[0, 3:] for m in (model, target)]
            assert both[0].any() and not both[1].any()


def test_copies_of_prepared_models_compute_with_their_own_weights() -> None:
    run(2, _copied)


def _scaled(clip: str) -> None:
    quiet()
    accelerator = Accelerator(backend=zerograph.backend(stage=3, compute="eager"), cpu=True)
    model = accelerator.prepare(torch.nn.Linear(4, 8))
    accelerator.backward(1024 * model(torch.ones(3, 4)).mean())

    def unscale() -> None:  # on a CPU Accelerate has no scaler, which would do this
        for param in model.parameters():
            param.grad.div_(1024)

    accelerator.unscale_gradients = unscale
    if clip == "norm":
        assert accelerator.clip_grad_norm_(model.parameters(), 1.0) < 1
    else:
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    assert all(0 < param.grad.to_local().abs().max() < 1 for param in model.parameters())


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_gradients_are_unscaled_before_they_are_clipped(clip: str) -> None:
    run(2, _scaled, clip)


def _alone() -> None:
    quiet()
    with pytest.raises(ConfigError, match="2 processes were started and Accelerate counts 1"):
        Accelerator(backend=zerograph.backend(stage=3))  # without cpu=True


def test_ranks_that_accelerate_would_let_train_alone_are_reported() -> None:
    run(2, _alone)


def test_what_would_distribute_or_compile_besides_is_refused() -> None:
    run(1, _refused)


class Scaled(torch.nn.Module):
    """Reads a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def _unwrapped() -> None:
    quiet()
    backend = zerograph.backend(stage=3, compute="eager")
    accelerator = Accelerator(backend=backend, cpu=True, mixed_precision="bf16")
    prepared, x = accelerator.prepare(Scaled()), torch.ones(2, 4)
    for options in ({}, {"keep_fp32_wrapper": False}, {"keep_fp32_wrapper": False}):
        model = accelerator.unwrap_model(prepared, **options)
        assert torch.equal(model(x), torch.arange(4.0).expand(2, 4))
        with torch.compiler.set_stance("force_eager"):  # as generate() runs
            assert torch.equal(model(x), torch.arange(4.0).expand(2, 4))
    assert not hasattr(model, "_original_forward")


def test_an_unwrapped_model_reads_whole_weights_where_it_is_not_compiled() -> None:
    run(2, _unwrapped)
