"""Fine-tune a Llama of transformers through four pipeline stages, unedited.

python examples/llama.py                    # random tiny weights, all ranks in this process
python examples/llama.py path/to/llama      # a local folder
torchrun --standalone --nproc-per-node 2 examples/llama.py
"""

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import penstock

torch.manual_seed(0)
if len(sys.argv) > 1:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
else:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=101)
    model = AutoModelForCausalLM.from_config(config)


# Two ranks with two stages each; under torchrun each is a process. The loss is the model's own.
with penstock.Pipeline(model, schedule="ZB-V", ranks=2) as pipe:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    tokens = torch.randint(0, model.config.vocab_size, (16, 32))
    for step in range(10):
        result = pipe.step(input_ids=tokens, labels=tokens, use_cache=False)
        norm = pipe.clip_grad_norm_(1.0)
        optimizer.step()
        pipe.zero_grad()
        if pipe.is_main_process:
            print(f"step {step + 1:2}  loss {result.loss:.4f}  gradient norm {norm:.3f}")
