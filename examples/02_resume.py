"""Continue the run of 01_first_run.py on any number of ranks, then export one plain safetensors file.

python examples/02_resume.py [checkpoint folder]     (or torchrun, on as many ranks as you like)
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, Config, evaluate
from text import batches, load
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zerograph

STEPS, BATCH = 50, 8  # the batch is per rank
FOLDER = sys.argv[1] if len(sys.argv) > 1 else "checkpoints/demo"
if not os.path.exists(f"{FOLDER}/.metadata"):
    raise SystemExit(f"there is no checkpoint in {FOLDER}\n\nhint: run examples/01_first_run.py first")

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if "RANK" in os.environ:  # torchrun started this process
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()  # gloo for CPU tensors, NCCL for CUDA tensors
rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def say(text: str) -> None:
    if rank == 0:
        print(text, flush=True)


model = GPT(Config()).to(device)
backend = zerograph.backend(stage=3)
zerograph.shard(model, backend)  # now rather than at the first call, so that each rank loads only its shards
model.compile(backend=backend)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)  # stay where the schedule ended

# A checkpoint holds whole tensors in pieces: any number of ranks can read the pieces that it needs.
weights, moments = get_state_dict(model, optimizer)
state = {"model": weights, "optimizer": moments, "scheduler": scheduler, "step": 0, "loss": 0.0}
dcp.load(state, checkpoint_id=FOLDER)
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

length = model.config.context
train, held_out = load()
say(f"saved at step {state['step']} with held-out loss {state['loss']:.4f}")
say(f"loaded on {world} rank(s) with held-out loss {evaluate(model, held_out):.4f}")

data = batches(train, STEPS, BATCH, length, seed=1_000_000 + rank)  # other batches than in the first run
for step, (x, y) in enumerate(data, start=1):
    loss = model(x.to(device), y.to(device))
    loss.backward()
    zerograph.clip_grad_norm_(model.parameters(), 1.0)  # like torch's, faster: it works on the local shards
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if step <= 5 or step % 10 == 0:
        say(f"step {state['step'] + step:4}  loss {loss.item():.3f}")

say(f"held-out loss after {STEPS} more steps {evaluate(model, held_out):.4f}")
zerograph.export(model, f"{FOLDER}/model.safetensors")
say(f"all weights are in {FOLDER}/model.safetensors")
if dist.is_initialized():
    dist.destroy_process_group()
