"""transformers' Trainer at ZeRO stage 3: the one line is where Trainer comes from, and its backend=.

torchrun --nproc-per-node 2 examples/04_trainer.py     (or python, as one process; again, it goes on where it was)
"""

import tempfile
from pathlib import Path

import torch

import zerograph

try:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainingArguments

    from zerograph.integrations.transformers import Trainer
except ImportError:
    raise SystemExit(
        "this example needs transformers and accelerate\n\nhint: pip install '.[trainer]' in the clone"
    ) from None

FOLDER = Path(tempfile.gettempdir(), "zerograph-trainer")


def counting(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Rows that count up by 1, 2 or 3 modulo 64: what the model is to learn."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 64, (count, 1), generator=generator)
    steps = torch.randint(1, 4, (count, 1), generator=generator)
    rows = (starts + steps * torch.arange(16)) % 64
    return [{"input_ids": row, "labels": row} for row in rows]


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
trainer = Trainer(
    LlamaForCausalLM(config),
    TrainingArguments(
        str(FOLDER),
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        max_steps=60,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=20,
        logging_steps=20,
        save_steps=40,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=counting(4096, seed=0),
    eval_dataset=counting(64, seed=1),
    backend=zerograph.backend(stage=3),
)
trainer.train(resume_from_checkpoint=any(FOLDER.glob("checkpoint-*")))  # of any number of ranks
trainer.save_model(str(FOLDER / "final"))  # all ranks; rank 0 writes model.safetensors

prompt = torch.tensor([[2, 4, 6, 8]], device=trainer.args.device)
text = trainer.model.generate(prompt, max_new_tokens=6, do_sample=False)  # all ranks
if trainer.is_world_process_zero():
    exported = AutoModelForCausalLM.from_pretrained(FOLDER / "final")
    print(f"2 4 6 8 goes on as {text[0, 4:].tolist()}; {exported.num_parameters()} parameters are in {FOLDER}/final")
trainer.accelerator.end_training()
