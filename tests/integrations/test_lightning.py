"""Lightning's Fabric and Trainer: the same loops under DDP and sharded, checkpoints, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

import zerograph
from zerograph.core.errors import CheckpointError, ConfigError, UnsupportedError

lightning = pytest.importorskip("lightning", reason="the optional extra lightning is not installed")

from integrations.small import close, generated, llama, plain, quiet, texts, unsharded  # noqa: E402
from lightning.fabric.plugins.environments import TorchElasticEnvironment  # noqa: E402
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel  # noqa: E402
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelPruning, StochasticWeightAveraging  # noqa: E402

from zerograph.integrations.lightning import ZeroGraphFabricStrategy, ZeroGraphStrategy  # noqa: E402

Curve = list[float]


def common(strategy: Any) -> dict[str, Any]:
    """What Fabric and Trainer are given as under torchrun, whose environment the ranks have."""
    quiet()
    return {
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "strategy": strategy,
        "plugins": [TorchElasticEnvironment()],
    }


def loader(rows: int = 0) -> DataLoader[Any]:
    return DataLoader(texts(32), batch_size=rows or 4 // dist.get_world_size())


def backend(stage: int) -> zerograph.Backend:
    return zerograph.backend(stage=stage, compute="eager")


class Run:
    """A user's loop with Fabric: two micro-batches per update, clipping. ``stage`` None is Fabric's DDP."""

    def __init__(self, stage: int | None, **options: Any) -> None:
        strategy = "ddp" if stage is None else ZeroGraphFabricStrategy(backend(stage), **options)
        self.fabric = lightning.Fabric(**common(strategy))
        self.fabric.launch()
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.plain = model
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.loader = self.fabric.setup_dataloaders(loader())
        self.held: list[str] = []

    def train(self, batches: range) -> Curve:
        """Losses over all ranks and norms of updates."""
        curve = []
        for index, batch in enumerate(self.loader):
            if index not in batches:
                continue
            last = index % 2 == 1
            with self.fabric.no_backward_sync(self.model, enabled=not last):
                loss = self.model(**batch, use_cache=False).loss
                self.fabric.backward(loss / 2)
            curve.append(self.fabric.all_reduce(loss.detach(), reduce_op="mean").item())
            if last:
                curve.append(float(self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5)))
                self.optimizer.step()
                self.held += unsharded(self.plain, self.optimizer.optimizer)
                self.optimizer.zero_grad()
        return curve


def _fabric(path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stage in (None, 1, 3):
        ours = Run(stage)
        curve = ours.train(range(4))
        if stage == 3:
            state = {"model": ours.model, "optimizer": ours.optimizer, "step": 4}
            ours.fabric.save(f"{path}/folder", state)
            ours.fabric.strategy._save_distributed_checkpoint = False
            ours.fabric.save(f"{path}/file", state)
            with pytest.raises(
                CheckpointError, match="is a folder, and save_distributed_checkpoint=False writes one file"
            ):
                ours.fabric.save(f"{path}/folder", state)
            Path(f"{path}/no folder").touch()
            with pytest.raises(CheckpointError, match=r"NotADirectoryError|FileExistsError"):
                ours.fabric.save(f"{path}/no folder/file", state)
            text = generated(ours.plain.eval())
            ours.plain.train()
        elif stage is None:
            text = generated(ours.plain)
        curve += ours.train(range(4, 8))
        found[str(stage)] = {"curve": curve, "text": text, "weights": plain(ours.plain.state_dict()), "held": ours.held}
    return found


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    path = str(tmp_path_factory.mktemp("fabric"))
    return path, run(2, _fabric, path)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["1", "3"])
def test_fabric_trains_as_under_ddp(fabric: Any, stage: str) -> None:
    for rank in fabric[1]:
        assert rank[stage]["curve"] == pytest.approx(rank["None"]["curve"], rel=2e-5)
        close(rank[stage]["weights"], rank["None"]["weights"])
        assert rank["3"]["text"] == rank["None"]["text"]
        assert rank["3"]["held"] == []


def _resume(path: str) -> Curve:
    ours = Run(3)
    state = {"model": ours.model, "optimizer": ours.optimizer, "step": 0}
    assert ours.fabric.load(path, state) == {}
    assert state["step"] == 4
    return ours.train(range(4, 8))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world"), [("folder", 1), ("file", 4)])
def test_fabric_resumes_at_another_world_size(fabric: Any, name: str, world: int) -> None:
    path, ranks = fabric
    assert run(world, _resume, f"{path}/{name}")[0][2::3] == pytest.approx(ranks[0]["3"]["curve"][6:][2::3], rel=2e-5)


class Language(lightning.LightningModule):
    """A LightningModule as users write them: a model of transformers as a child, logging in its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.curve: Curve = []
        self.held: list[str] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = self.model(**batch, use_cache=False).loss
        self.log("loss", loss, sync_dist=True)
        self.curve.append(self.trainer.strategy.reduce(loss.detach(), reduce_op="mean").item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("evaluated", self.model(**batch, use_cache=False).loss, sync_dist=True)

    def configure_model(self) -> None:
        mesh = self.device_mesh if isinstance(self.trainer.strategy, ZeroGraphStrategy) else None
        if mesh is not None and mesh["tensor_parallel"].size() > 1:
            plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
            mlp = self.model.model.layers[0].mlp
            if not isinstance(mlp.up_proj.weight, DTensor):  # each run of a Trainer calls this
                parallelize_module(mlp, mesh["tensor_parallel"], plan)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.curve:
            self.held += unsharded(self, optimizer)

    def configure_optimizers(self) -> Any:
        params = list(self.parameters())  # in groups, whose order is not the model's
        groups = [{"params": [p for p in params if (p.ndim > 1) is matrix]} for matrix in (True, False)]
        return torch.optim.AdamW([groups[0] | {"weight_decay": 0.1}, groups[1] | {"weight_decay": 0.0}], lr=1e-2)


def fit(path: str, stage: int | None, steps: int, resume: str | None = None, rows: int = 0, **options: Any) -> Language:
    trainer = lightning.Trainer(
        **common("ddp" if stage is None else ZeroGraphStrategy(backend(stage), **options)),
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        val_check_interval=4,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        default_root_dir=path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
    )
    module = Language()
    trainer.fit(module, loader(rows), loader(rows), ckpt_path=resume)
    module.curve.append(float(trainer.callback_metrics["evaluated"]))
    if resume is None:
        trainer.save_checkpoint(f"{path}/saved")
    return module


def _trainer(path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stage in (None, 3):
        module = fit(f"{path}/{stage}", stage, 4)
        found[str(stage)] = {"curve": module.curve, "held": module.held, "weights": plain(module.state_dict())}
        found[str(stage)]["text"] = generated(module.model.eval())
    fit(f"{path}/ddp", None, 2)
    found["resumed"] = plain(fit("", None, 4, f"{path}/ddp/saved").state_dict())
    half = fit(f"{path}/file", 3, 2, save_distributed_checkpoint=False)
    half.trainer.strategy._save_distributed_checkpoint = True
    half.trainer.save_checkpoint(f"{path}/folder/saved")
    return found


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    path = str(tmp_path_factory.mktemp("lightning"))
    return path, run(2, _trainer, path)


def test_trainer_trains_as_under_ddp(trainer: Any) -> None:
    for rank in trainer[1]:
        assert rank["3"]["curve"] == pytest.approx(rank["None"]["curve"], rel=2e-5)
        close(rank["3"]["weights"], rank["None"]["weights"])
        assert rank["3"]["text"] == rank["None"]["text"]
        assert rank["3"]["held"] == []


def _tensor_parallel(path: str) -> tuple[Curve, dict[str, Tensor]]:
    module = fit(path, 3, 4, rows=2, tensor_parallel_size=2)
    module.trainer.validate(module, loader(2))  # which sets up anew
    up = module.model.model.layers[0].mlp.up_proj.weight
    assert up.device_mesh.mesh_dim_names == ("data_parallel", "tensor_parallel") and 4 * len(up.to_local()) == len(up)
    with pytest.raises(ConfigError, match="leaves none to shard over"):
        fit(path, 3, 4, tensor_parallel_size=4)
    return module.curve, plain(module.state_dict())


def test_trainer_with_tensor_parallelism(trainer: Any, tmp_path: Path) -> None:
    truth = trainer[1][0]["None"]
    for curve, weights in run(4, _tensor_parallel, str(tmp_path)):
        assert curve == pytest.approx(truth["curve"], rel=2e-5)
        close(weights, truth["weights"])


def _fabric_with_tensor_parallelism(lightnings: bool) -> None:
    """Losses and weights are those of one process on whole batches. ``lightnings``: the strategy is Lightning's own,
    whose user parallelizes, shards and compiles."""
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}

    def parallelize(module: Any, mesh: Any) -> Any:
        parallelize_module(module.model.layers[0].mlp, mesh["tensor_parallel"], plan)
        return module

    def parallelize_and_shard(module: Any, mesh: Any) -> Any:
        own = zerograph.backend(stage=3, compute="eager", mesh=mesh["data_parallel"])
        zerograph.shard(parallelize(module, mesh), own)
        module.compile(backend=own)
        return module

    if lightnings:
        strategy = FabricModelParallel(parallelize_and_shard, data_parallel_size=2, tensor_parallel_size=2)
    else:
        strategy = ZeroGraphFabricStrategy(backend(3), tensor_parallel_size=2)
    fabric = lightning.Fabric(**common(strategy))
    fabric.launch()
    model, whole = llama(), llama()
    module = fabric.setup_module(model if lightnings else parallelize(model, strategy.device_mesh))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=1e-2))
    others = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    batches = zip(fabric.setup_dataloaders(loader(2)), loader(4), strict=True)
    for batch, all_rows in itertools.islice(batches, 4):
        loss, expected = module(**batch, use_cache=False).loss, whole(**all_rows, use_cache=False).loss
        fabric.backward(loss)
        expected.backward()
        assert fabric.all_reduce(loss.detach(), reduce_op="mean").item() == pytest.approx(expected.item(), rel=2e-5)
        norm = fabric.clip_gradients(module, optimizer, max_norm=0.5)
        truth = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        assert float(norm) == pytest.approx(truth.item(), rel=2e-5)
        for one in (optimizer, others):
            one.step()
            one.zero_grad()
    up = model.model.layers[0].mlp.up_proj.weight
    assert up.device_mesh.mesh_dim_names == ("data_parallel", "tensor_parallel") and 4 * len(up.to_local()) == len(up)
    close(plain(model.state_dict()), plain(whole.state_dict()))


@pytest.mark.parametrize("lightnings", [False, True])
def test_fabric_with_tensor_parallelism(lightnings: bool) -> None:
    run(4, _fabric_with_tensor_parallelism, lightnings)


def _resumed(path: str) -> dict[str, Tensor]:
    return plain(fit("", 3, 4, resume=path).state_dict())


@pytest.mark.parametrize(("name", "world"), [("file", 1), ("folder", 1), ("ddp", 1)])
def test_trainer_resumes_at_another_world_size(trainer: Any, name: str, world: int) -> None:
    """Lightning starts the epoch again, whose batches are the same on any number of ranks: so does its DDP."""
    path, ranks = trainer
    close(run(world, _resumed, f"{path}/{name}/saved")[0], ranks[0]["resumed"])


def _evaluated(path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """By a Trainer that does not train: it has no optimizers, whose states are in the file."""
    module = Language()
    common_options = common(ZeroGraphStrategy(backend(3)))
    trainer = lightning.Trainer(**common_options, limit_val_batches=1, logger=False, enable_progress_bar=False)
    trainer.validate(module, loader(2), ckpt_path=path, verbose=False)
    return plain(module.state_dict()), torch.load(path, weights_only=False)["state_dict"]


def test_a_file_is_evaluated(trainer: Any) -> None:
    for ours, theirs in run(2, _evaluated, f"{trainer[0]}/ddp/saved"):
        close(ours, theirs)


def _without_states(path: str) -> None:
    strategy = ZeroGraphFabricStrategy(backend(3), save_distributed_checkpoint=False)
    fabric = lightning.Fabric(**common(strategy))
    fabric.launch()
    model = torch.nn.Linear(4, 2)
    module, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.save(path, {"model": module, "optimizer": optimizer})
    saved = plain(model.state_dict())
    torch.nn.init.zeros_(model.weight)
    optimizer.param_groups[0]["lr"] = 0.2
    fabric.load(path, {"model": module, "optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.1
    close(plain(model.state_dict()), saved)


def test_a_file_of_an_optimizer_without_states_is_loaded(tmp_path: Path) -> None:
    run(1, _without_states, str(tmp_path / "file"))


def _refused(path: str) -> None:
    for strategy in (ZeroGraphStrategy, ZeroGraphFabricStrategy):
        with pytest.raises(ConfigError, match=f"{strategy.__name__} got int in the place of a Backend"):
            strategy(3)
        with pytest.raises(ConfigError, match="save_distributed_checkpoint must be True or False"):
            strategy(zerograph.backend(), "file")
    ours = Run(3)
    with pytest.raises(CheckpointError, match="given 0 models"):
        ours.fabric.save(path, {"optimizer": ours.optimizer})
    with pytest.raises(CheckpointError, match="no checkpoint"):
        ours.fabric.load(f"{path}/nothing", {"model": ours.model})
    pruning = ModelPruning("l1_unstructured", amount=0.5)
    for callback in (StochasticWeightAveraging(1e-2), EMAWeightAveraging(), pruning):
        averaging = lightning.Trainer(**common(ZeroGraphStrategy(backend(3))), callbacks=[callback], logger=False)
        with pytest.raises(UnsupportedError, match=f"{type(callback).__name__} (copies the model|replaces parameters)"):
            averaging.fit(Language(), loader())


def test_what_cannot_be_saved_or_loaded_is_reported(tmp_path: Path) -> None:
    run(1, _refused, str(tmp_path))
