"""transformers' Trainer: the same run under DDP and sharded, its checkpoints, LoRA, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from safetensors.torch import load_file

import zerograph
from zerograph.core.errors import ConfigError
from zerograph.core.instructions import Accumulate

transformers = pytest.importorskip("transformers", reason="the optional extra transformers is not installed")
pytest.importorskip("accelerate", reason="the optional extra transformers is not installed")

from integrations.small import close, generated, llama, plain, quiet, texts, unsharded  # noqa: E402

from zerograph.integrations.transformers import ShardedTrainer, Trainer  # noqa: E402

Logs = list[dict[str, float]]


def arguments(path: str, **options: Any) -> Any:
    """Four updates of two micro-batches of four rows over all ranks; clipped, evaluated and saved every second one."""
    given = {
        "per_device_train_batch_size": 4 // dist.get_world_size() if dist.is_initialized() else 4,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "ddp_backend": "gloo",
    }
    return transformers.TrainingArguments(path, **(given | options))


def trainer(
    path: str, stage: int | None, model: Any, keep: str = "FULL_STATE_DICT", tiles: int = 1, **options: Any
) -> Any:
    """``stage`` None: Trainer as it is, which wraps in DDP."""
    quiet()
    parts = {
        "model": model,
        "args": arguments(path, **options),
        "train_dataset": texts(64),
        "eval_dataset": texts(8, 1),
    }
    if stage is None:
        return transformers.Trainer(**parts)
    backend = zerograph.backend(stage=stage, compute="eager", loss_tiles=tiles)
    return Trainer(**parts, backend=backend, state_dict_type=keep)


class Look(transformers.TrainerCallback):
    """Looks at gradients and states before they are zeroed, once."""

    found: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if state.global_step == 1:  # one update is done: there are states
            self.found = unsharded(parts["model"], parts["optimizer"].optimizer)


def curve(logs: Logs) -> list[tuple[int, str, float]]:
    return [(e["step"], name, e[name]) for e in logs for name in ("loss", "grad_norm", "eval_loss") if name in e]


def same_curve(ours: Logs, theirs: Logs) -> None:
    ours, theirs = curve(ours), curve(theirs)
    assert [e[:2] for e in ours] == [e[:2] for e in theirs]
    assert [e[2] for e in ours] == pytest.approx([e[2] for e in theirs], rel=2e-5)


def _train(path: str) -> dict[str, Any]:
    """The same run under DDP and at stage 3; it ends with the best checkpoint, which is not the last."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    ddp = trainer(f"{path}/ddp", None, llama(), **best)
    ddp.train()
    ours, look = trainer(f"{path}/ours", 3, llama(), **best), Look()
    ours.add_callback(look)
    before = ours.evaluate()["eval_loss"]
    ours.state.log_history.clear()
    ours.train()
    ours.save_model(f"{path}/final")
    return {
        "ddp": ddp.state.log_history,
        "ours": ours.state.log_history,
        "before": before,
        "best": [t.state.best_global_step for t in (ddp, ours)],
        "weights": [plain(t.model.state_dict()) for t in (ddp, ours)],
        "unsharded": look.found,
        "wrapper": type(ours.model_wrapped).__name__,
        "generated": [[generated(t.model, stops) for t in (ddp, ours)] for stops in (False, True)],
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    path = str(tmp_path_factory.mktemp("trainer"))
    return path, run(2, _train, path)


def test_losses_norms_and_evaluations_are_those_under_ddp(trained: Any) -> None:
    for rank in trained[1]:
        same_curve(rank["ours"], rank["ddp"])
        assert rank["best"] == [2, 2]
        assert rank["before"] > 4
        close(*rank["weights"][::-1])


def test_parameters_gradients_and_states_are_sharded_and_nothing_wraps_the_model(trained: Any) -> None:
    for rank in trained[1]:
        assert rank["unsharded"] == []
        assert rank["wrapper"] == "LlamaForCausalLM"


def test_ranks_generate_their_own_texts_though_some_end_sooner(trained: Any) -> None:
    for rank in trained[1]:
        for ddp, ours in rank["generated"]:
            assert ours == ddp


def test_save_model_writes_what_from_pretrained_reads(trained: Any) -> None:
    path, ranks = trained
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{path}/final")
    close(plain(model.state_dict()), ranks[0]["weights"][1])


def test_save_model_writes_tied_weights_once(trained: Any, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    ours, theirs = (load_file(Path(where, "model.safetensors")) for where in (f"{trained[0]}/final", tmp_path))
    assert ours.keys() == theirs.keys()


def _resume(path: str, checkpoint: str, keep: str) -> Logs:
    ours = trainer(path, 3, llama(), keep)
    ours.train(resume_from_checkpoint=checkpoint)
    return ours.state.log_history


def test_a_checkpoint_of_two_ranks_resumes_on_one(trained: Any, tmp_path: Path) -> None:
    path, ranks = trained
    resumed = run(1, _resume, str(tmp_path), f"{path}/ours/checkpoint-2", "FULL_STATE_DICT")[0]
    same_curve(resumed, ranks[0]["ddp"])


def _sharded_files(path: str) -> list[str]:
    ours = trainer(path, 3, llama(), "SHARDED_STATE_DICT", max_steps=2, lr_scheduler_type="constant")
    ours.train()
    ours.save_model(f"{path}/final")
    return sorted(p.name for p in Path(path, "checkpoint-2").iterdir())


@pytest.mark.slow
def test_a_sharded_checkpoint_of_one_rank_resumes_on_two(trained: Any, tmp_path: Path) -> None:
    """The learning rate is constant up to the checkpoint, so that curves may be compared only after a fresh start."""
    files = run(1, _sharded_files, str(tmp_path))[0]
    assert {"optimizer_0", "pytorch_model_fsdp_0"} <= set(files)
    assert "model.safetensors" in {p.name for p in (tmp_path / "final").iterdir()}
    where = (str(tmp_path / "resumed"), str(tmp_path / "checkpoint-2"), "SHARDED_STATE_DICT")
    on_two, on_one = run(2, _resume, *where)[0], run(1, _resume, *where)[0]
    same_curve(on_two, on_one)
    assert curve(on_two)[-1][0] == 4


def _adapted(path: str) -> dict[str, Any]:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    found: dict[str, Any] = {}
    for stage in (None, 3):
        base = llama()
        torch.manual_seed(1)
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        ours, look = trainer(f"{path}/{stage}", stage, model, max_steps=2), Look()
        ours.add_callback(look)
        ours.train()
        ours.save_model(f"{path}/{stage}/final")
        found[str(stage)] = ours.state.log_history
        found[f"{stage} unsharded"] = look.found
        found[f"{stage} generated"] = generated(ours.model)
    resumed = trainer(
        f"{path}/again", 3, peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    )
    resumed.train(resume_from_checkpoint=f"{path}/3/checkpoint-2")
    found["resumed"] = resumed.state.log_history
    return found


def test_lora_trains_as_under_ddp_with_the_base_sharded(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    for rank in run(2, _adapted, str(tmp_path)):
        same_curve(rank["3"], rank["None"])
        assert rank["3 unsharded"] == []
        assert rank["3 generated"] == rank["None generated"]
        assert curve(rank["resumed"])[-1][0] == 4
    theirs, ours = (load_file(tmp_path / stage / "final" / "adapter_model.safetensors") for stage in ("None", "3"))
    close(ours, theirs)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"torch_compile": True}, "FULL_STATE_DICT", "torch_compile"),
    ({"torch_compile_backend": "zerograph"}, "FULL_STATE_DICT", "torch_compile"),
    ({"auto_find_batch_size": True}, "FULL_STATE_DICT", "auto_find_batch_size"),
    ({"save_only_model": True, "load_best_model_at_end": True}, "FULL_STATE_DICT", "load_best_model_at_end"),
    ({"save_only_model": True}, "SHARDED_STATE_DICT", "sharded checkpoints"),
]


def _tiled(path: str) -> tuple[int, dict[str, int]]:
    found = trainer(path, 3, llama(), tiles=3, eval_strategy="no", max_steps=1)
    found.train()
    report = found._backend.report()
    return sum(isinstance(i, Accumulate) for i in found._backend.program["forward"].instructions), report.graph_breaks


def test_a_step_is_one_graph_whose_logits_are_in_tiles(tmp_path: Path) -> None:
    """The model returns logits, which Trainer does not read in training."""
    for sums, breaks in run(2, _tiled, str(tmp_path)):
        assert sums == 3 and not breaks


class Reads(Trainer):
    """Reads logits in training."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        found = model(**inputs)
        assert found.logits is not None
        return (found.loss, found) if return_outputs else found.loss


class Steps(Trainer):
    """Reads logits in a step of its own."""

    def training_step(self, model: Any, inputs: Any, *_: Any) -> Any:
        loss, found = self.compute_loss(model, inputs, return_outputs=True)
        assert found.logits is not None
        self.accelerator.backward(loss)
        return loss.detach()


def _one_after_another(path: str) -> None:
    backend = zerograph.backend(stage=3, compute="eager")
    for kind in (Trainer, Reads, Steps):
        own = {"args": arguments(path, eval_strategy="no", max_steps=1), "train_dataset": texts(64)}
        found = kind(model=llama(), **own, backend=backend)
        found.train()
        assert zerograph.backend_of(found.model).config.loss_only is (kind is Trainer)
        assert backend.config.loss_only is False
    smoothed = arguments(path, eval_strategy="no", label_smoothing_factor=0.1)
    assert not Trainer(model=llama(), args=smoothed, backend=backend)._backend.config.loss_only


def test_another_trainer_with_that_backend_may_read_logits(tmp_path: Path) -> None:
    run(1, _one_after_another, str(tmp_path))


class Refers(transformers.Trainer):
    """Prepares a reference model as TRL's DPOTrainer, KTOTrainer and GRPOTrainer do."""

    def __init__(self, *arguments: Any, reference: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.is_fsdp_enabled:
            torch.distributed.fsdp.fully_shard(reference)
        else:
            reference = self.accelerator.prepare_model(reference, evaluation_mode=True)
        self.reference = reference

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        ours = model(**inputs)
        with torch.no_grad():
            theirs = self.reference(**inputs)
        loss = ours.loss + (ours.logits - theirs.logits).square().mean()
        return (loss, ours) if return_outputs else loss


class ShardedRefers(ShardedTrainer, Refers):
    pass


def _referring(path: str) -> list[Logs]:
    quiet()
    logs, backend = [], zerograph.backend(stage=3, compute="eager")
    for kind, more in ((Refers, {}), (ShardedRefers, {"backend": backend})):
        args = arguments(path, eval_strategy="no", max_steps=2, bf16=True)
        reference = llama().requires_grad_(False)
        made = kind(model=llama(), reference=reference, args=args, train_dataset=texts(64), **more)
        made.train()
        logs.append(made.state.log_history)
    assert made.is_fsdp_enabled
    assert zerograph.backend_of(made.model) is backend
    assert zerograph.backend_of(made.reference) not in (None, backend)
    return logs


def test_a_reference_model_that_a_trainer_prepares_is_sharded_with_a_backend_of_its_own(tmp_path: Path) -> None:
    for theirs, ours in run(2, _referring, str(tmp_path)):
        assert [e["loss"] for e in ours[:2]] == pytest.approx([e["loss"] for e in theirs[:2]], rel=2e-3)


def _own_optimizer(path: str) -> list[Logs]:
    """Trained by an optimizer that was made before the model was sharded, under DDP and here."""
    quiet()
    logs, backend = [], zerograph.backend(stage=3, compute="eager")
    for kind, more in ((transformers.Trainer, {}), (Trainer, {"backend": backend})):
        model, args = llama(), arguments(path, eval_strategy="no")
        own = torch.optim.AdamW(model.parameters(), lr=1e-2)
        made = kind(model=model, args=args, train_dataset=texts(64), optimizers=(own, None), **more)
        made.train()
        logs.append(made.state.log_history)
    return logs


def test_a_trainer_takes_an_optimizer(tmp_path: Path) -> None:
    for theirs, ours in run(2, _own_optimizer, str(tmp_path)):
        same_curve(ours, theirs)


def _trials(path: str) -> None:
    """As a search of hyperparameters does: an accelerator and a model for each trial."""
    quiet()
    args = arguments(path, eval_strategy="no", max_steps=1)
    made = Trainer(model_init=llama, args=args, train_dataset=texts(64), backend=zerograph.backend(compute="eager"))
    made.train()
    first = zerograph.backend_of(made.model)
    made.create_accelerator_and_postprocess()
    made.train()
    second = zerograph.backend_of(made.model)
    assert second is not first and first.config.loss_only and second.config.loss_only


def test_models_of_a_search_have_a_backend_each(tmp_path: Path) -> None:
    run(1, _trials, str(tmp_path))


def _refused(path: str) -> None:
    for options, keep, named in REFUSED:
        with pytest.raises(ConfigError, match=named):
            trainer(path, 3, llama(), keep, **options)
        os.environ.pop("ACCELERATE_DYNAMO_BACKEND", None)  # which TrainingArguments leaves behind
    with pytest.raises(ConfigError, match="Trainer got int in the place of a Backend"):
        Trainer(llama(), arguments(path), backend=3)
    for unknown in ("sharded_state_dict", "LOCAL_STATE_DICT", None):
        with pytest.raises(ConfigError, match="state_dict_type must be"):
            Trainer(llama(), arguments(path), backend=zerograph.backend(), state_dict_type=unknown)


def test_arguments_that_do_not_go_with_sharding_are_refused(tmp_path: Path) -> None:
    run(1, _refused, str(tmp_path))
