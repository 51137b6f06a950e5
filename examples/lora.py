"""LoRA on a Llama with frozen weights in bfloat16, in a loop of one's own; the adapter is saved as by PEFT.

python examples/lora.py                                         # both ranks in one process
torchrun --standalone --nproc-per-node 2 examples/lora.py       # a rank in each process
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import penstock


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=101,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


model = get_peft_model(
    base(), LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
)
with penstock.Pipeline(model, schedule="ZB-V", ranks=2, microbatches=4) as pipe:
    module = penstock.PipelineModule(pipe)
    adapters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=0.01)
    tokens = torch.randint(101, (8, 16), generator=torch.Generator().manual_seed(1))
    for step in range(10):
        loss = module(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if pipe.is_main_process:
            print(f"step {step:2}  loss {loss:.4f}")

    with TemporaryDirectory() as folder:
        module.save_pretrained(folder)  # every rank calls it, and one writes
        if pipe.is_main_process:
            files = sorted(file.name for file in Path(folder).iterdir())
            PeftModel.from_pretrained(base(), folder)
            print("saved and loaded by PEFT:", *files)
