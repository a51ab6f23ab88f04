"""transformers: :class:`Trainer`, and :class:`ShardedTrainer` to mix into other trainers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import transformers

from zerograph.api import Backend, refuse_other_backends
from zerograph.core.errors import ConfigError
from zerograph.integrations.accelerate import Accelerator

_Mixed: Any = transformers.Trainer if TYPE_CHECKING else object


class ShardedTrainer(_Mixed):
    """Makes a ``transformers.Trainer`` shard and compile its model with ZeroGraph.

    Put it first among the bases: ``class MyTrainer(ShardedTrainer, SFTTrainer): pass``.

    Args:
        backend: made by ``zerograph.backend(...)``. Where nobody reads the model's outputs beside its loss in training,
            the model gets a copy with ``loss_only=True`` (``zerograph.backend_of(model)``).
        state_dict_type: how checkpoints are written, as in ``fsdp_config``: "FULL_STATE_DICT" (rank 0 gathers weights
            and optimizer states on the host, and writes model.safetensors too) or "SHARDED_STATE_DICT" (each rank
            writes its shards; ``save_model`` writes model.safetensors when you call it).
        arguments: those of the trainer.

    Raises:
        ConfigError: ``backend`` is no backend, or one of ``TrainingArguments`` does not go with sharding.
    """

    def __init__(
        self, *arguments: Any, backend: Backend, state_dict_type: str = "FULL_STATE_DICT", **options: Any
    ) -> None:
        refuse_other_backends(backend, type(self).__name__)
        self._backend, self._state_dict_type = backend, state_dict_type
        super().__init__(*arguments, **options)
        self.is_fsdp_enabled = True  # Trainer then loads after sharding, and saves with Accelerate's functions
        generation: Any = getattr(self, "vllm_generation", None)
        if hasattr(generation, "is_fsdp_enabled"):
            generation.is_fsdp_enabled = True  # TRL sends it whole weights then
        given = self.accelerator._next_backend = self.accelerator._given_backend
        if self._reads_loss_only and not given.config.loss_only:
            # Not the given one, with which another model may be trained whose logits somebody reads.
            self._backend = self.accelerator._next_backend = copy.copy(given)
            self._backend.config = replace(given.config, loss_only=True)

    @property
    def _reads_loss_only(self) -> bool:
        """Whether nobody reads what the model returns in training beside its loss."""
        own, plain = type(self), transformers.Trainer
        returns_loss = own.compute_loss is plain.compute_loss and own.training_step is plain.training_step
        return returns_loss and self.compute_loss_func is None and not self.label_smoother

    def _validate_args(self) -> None:
        """Without the refusal of an optimizer that was made before sharding, which FSDP leaves behind.

        From here to the end of ``__init__`` the classes of others prepare models of theirs: where FSDP is enabled, TRL
        wraps a reference model in it and does not ask the accelerator.
        """
        self.is_fsdp_enabled = False
        super()._validate_args()

    def create_accelerator_and_postprocess(self) -> None:
        _refuse(self.args, self._sharded_files)
        again = hasattr(self, "accelerator")
        if again:  # a search of hyperparameters: a backend holds the model that it was given
            self._backend = copy.copy(self._backend)
        super().create_accelerator_and_postprocess()
        ours = Accelerator.of(self.accelerator, self._backend, self._state_dict_type)
        if not again:  # models that are prepared in __init__ are others than the one to train
            ours._next_backend = copy.copy(ours._given_backend)
        self.is_fsdp_enabled = True

    @property
    def _sharded_files(self) -> bool:
        return self._state_dict_type == "SHARDED_STATE_DICT"

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer's, which writes no weights where checkpoints are sharded; called by the user, it does here."""
        if self._sharded_files and not _internal_call:
            self._save(output_dir, state_dict=self.accelerator.get_state_dict(self.model))
        super().save_model(output_dir, _internal_call)


class Trainer(ShardedTrainer, transformers.Trainer):
    """``transformers.Trainer`` with an argument more: ``Trainer(..., backend=zerograph.backend(stage=3))``.

    Arguments are those of :class:`ShardedTrainer`.
    """


def _refuse(args: transformers.TrainingArguments, sharded_files: bool) -> None:
    """Refuse arguments that another owner of the model, or of its processes, would need.

    Raises:
        ConfigError: naming the first.
    """
    launch = "start one process per device: torchrun --nproc-per-node N script.py"
    unsaved = "leave save_only_model out" + (', or give state_dict_type="FULL_STATE_DICT"' if sharded_files else "")
    refused = {
        "torch_compile": (args.torch_compile, "leave it out: backend=zerograph.backend(...) compiles"),
        "deepspeed": (args.deepspeed, "leave it out: zerograph.backend(stage=1, 2 or 3) shards"),
        "fsdp": (args.fsdp, "leave it out: zerograph.backend(stage=1, 2 or 3) shards"),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "one rank that runs out of memory cannot start again without the others; "
            "give a batch size, which `zerograph plan --largest batch` finds",
        ),
        f"{args.n_gpu} GPUs in one process": (args.n_gpu > 1, launch),
        "save_only_model with load_best_model_at_end": (args.save_only_model and args.load_best_model_at_end, unsaved),
        "save_only_model with sharded checkpoints": (args.save_only_model and sharded_files, unsaved),
    }
    for name, (given, hint) in refused.items():
        if given:
            raise ConfigError(f"Trainer was given {name}, which does not go with ZeroGraph's sharding", hint)
