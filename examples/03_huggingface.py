"""Train a small Llama from transformers at ZeRO stage 3, then let its own generate() write some text.

torchrun --nproc-per-node 2 examples/03_huggingface.py     (or python, as one process)
"""

import os

import torch
import torch.distributed as dist
from text import batches, load

import zerograph

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    raise SystemExit("this example needs transformers\n\nhint: pip install transformers") from None

STEPS, BATCH, LENGTH = 200, 8, 128  # the batch is per rank

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if "RANK" in os.environ:  # torchrun started this process
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()  # gloo for CPU tensors, NCCL for CUDA tensors
rank = dist.get_rank() if dist.is_initialized() else 0

config = LlamaConfig(
    vocab_size=256,  # one token per byte: no tokenizer
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
model = LlamaForCausalLM(config).to(device)  # random weights: nothing is downloaded
backend = zerograph.backend(stage=3, loss_only=True)  # training reads no logits, so they need not stay
model.compile(backend=backend)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

train, _ = load()
data = batches(train, STEPS, BATCH, LENGTH, seed=rank)  # other data on each rank
for step, (x, _) in enumerate(data, start=1):
    x = x.to(device)
    loss = model(input_ids=x, labels=x, use_cache=False).loss  # transformers shifts the labels itself
    loss.backward()
    zerograph.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and (step == 1 or step % 20 == 0):
        print(f"step {step:4}  loss {loss.item():.3f}", flush=True)

# The parameters stay sharded: every rank generates, and must sample the same bytes.
model.eval()
torch.manual_seed(0)
prompt = torch.tensor([list(b"def ")], device=device)
with torch.compiler.set_stance("force_eager"):  # the cache grows with every byte: not worth compiling here
    sampled = model.generate(prompt, max_new_tokens=200, do_sample=True)
if rank == 0:
    print(f"\n{bytes(sampled[0].tolist()).decode(errors='replace')}\n\n{backend.report()}")
if dist.is_initialized():
    dist.destroy_process_group()
