"""Peak resident memory of one rank under transformers' Trainer, Accelerate and Lightning, beside the plain loop.

    python benchmarks/trainers.py                     # 2 gloo ranks, stage 3, a Llama of 34 M parameters
    python benchmarks/trainers.py --loops plain,trainer --hidden 1024

Prediction. Each is within 5% of the plain loop's: a library that keeps a copy of the parameters, or another wrapper's
buckets, would show as a quarter of the model or more.

Method. Every loop has fresh processes that import all libraries first. They train the same model on the same batches
with fused AdamW and clipping for eight steps; the peak is the kernel's (VmHWM) since the end of the third, when the
kernel was told to forget it (/proc/self/clear_refs), of the largest rank. glibc maps every tensor of more than 64 KiB
by itself: what it keeps free between others varies by a tenth from run to run, and is no loop's.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from crew import free_port
from rich.console import Console
from torch.utils.data import DataLoader

OUT = Console()
STEPS, WARM, MB = 8, 3, 1e6


def status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


class Meter:
    """Told of the end of each step; knows the peak from the third on."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps == WARM:
            Path("/proc/self/clear_refs").write_text("5")


def model(args: argparse.Namespace) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = args.hidden // 64
    sizes = {"hidden_size": args.hidden, "intermediate_size": 4 * args.hidden, "num_hidden_layers": args.layers}
    return LlamaForCausalLM(LlamaConfig(vocab_size=8192, num_attention_heads=heads, use_cache=False, **sizes))


def data(args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(
        0, 8192, (args.batch * args.world * STEPS, args.seq), generator=torch.Generator().manual_seed(0)
    )
    return [{"input_ids": row, "labels": row} for row in rows]


def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


def plain(args: argparse.Namespace, backend: Any, meter: Meter) -> None:
    import zerograph

    torch.distributed.init_process_group("gloo")
    module = model(args)
    module.compile(backend=backend)
    optimizer, rank = adamw(module), torch.distributed.get_rank()
    rows = data(args)[rank :: args.world]
    for batch in DataLoader(rows, batch_size=args.batch):
        loss = module(**batch).loss
        loss.backward()
        zerograph.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.step()


def trainer(args: argparse.Namespace, backend: Any, meter: Meter) -> None:
    from transformers import TrainerCallback, TrainingArguments

    from zerograph.integrations.transformers import Trainer

    class Steps(TrainerCallback):
        def on_step_end(self, *_: Any, **parts: Any) -> None:
            meter.step()

    options = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=args.batch, max_steps=STEPS, use_cpu=True, ddp_backend="gloo",
        report_to=[], disable_tqdm=True, save_strategy="no", optim="adamw_torch_fused",
    )  # fmt: skip
    Trainer(model(args), options, train_dataset=data(args), backend=backend, callbacks=[Steps()]).train()


def accelerate(args: argparse.Namespace, backend: Any, meter: Meter) -> None:
    from zerograph.integrations.accelerate import Accelerator

    accelerator = Accelerator(backend=backend, cpu=True)
    module = model(args)
    loader = DataLoader(data(args), batch_size=args.batch)
    module, optimizer, loader = accelerator.prepare(module, adamw(module), loader)
    for batch in loader:
        accelerator.backward(module(**batch).loss)
        accelerator.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.step()


def fabric(args: argparse.Namespace, backend: Any, meter: Meter) -> None:
    from lightning import Fabric

    from zerograph.integrations.lightning import ZeroGraphFabricStrategy

    runner = Fabric(accelerator="cpu", devices=args.world, strategy=ZeroGraphFabricStrategy(backend))
    runner.launch()
    module = model(args)
    module, optimizer = runner.setup(module, adamw(module))
    for batch in runner.setup_dataloaders(DataLoader(data(args), batch_size=args.batch)):
        runner.backward(module(**batch).loss)
        runner.clip_gradients(module, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.step()


def lightning(args: argparse.Namespace, backend: Any, meter: Meter) -> None:
    from lightning import LightningModule, Trainer

    from zerograph.integrations.lightning import ZeroGraphStrategy

    class Language(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model(args)

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.model(**batch).loss

        def on_train_batch_end(self, *_: Any) -> None:
            meter.step()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"accelerator": "cpu", "devices": args.world, "max_steps": STEPS, "gradient_clip_val": 1.0, **quiet}
    runner = Trainer(strategy=ZeroGraphStrategy(backend), enable_model_summary=False, **options)
    runner.fit(Language(), DataLoader(data(args), batch_size=args.batch))


LOOPS: dict[str, Callable[[argparse.Namespace, Any, Meter], None]] = {
    loop.__name__: loop for loop in (plain, trainer, accelerate, fabric, lightning)
}


def rank(index: int, name: str, args: argparse.Namespace, port: int, peaks: Any) -> None:
    os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(args.world)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(args.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 64 * 1024)  # M_MMAP_THRESHOLD
    import zerograph
    import zerograph.integrations.lightning
    import zerograph.integrations.transformers

    meter = Meter()
    LOOPS[name](args, zerograph.backend(stage=args.stage), meter)
    assert meter.steps == STEPS
    peaks[index] = status("VmHWM")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 512), ("layers", 6), ("batch", 4), ("seq", 128), ("world", 2), ("stage", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--loops", default=",".join(LOOPS))
    args = parser.parse_args()
    OUT.print(f"peak of a rank at stage {args.stage} on {args.world} ranks, and relative to the first loop")
    first = 0
    for name in args.loops.split(","):
        peaks = mp.get_context("spawn").Array("q", args.world)
        mp.spawn(rank, (name, args, free_port(), peaks), nprocs=args.world)
        first = first or max(peaks)
        OUT.print(f"{name:10} {max(peaks) / MB:6.0f} MB {max(peaks) / first:6.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
