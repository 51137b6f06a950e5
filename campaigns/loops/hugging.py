"""The Trainer of transformers, those of TRL, adapters of PEFT, and loops of Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import transformers
import trl
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from datasets import Dataset
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import Trainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from campaigns.loops.setting import STEPS, Outcome, Setting, program
from penstock import PipelineModule
from penstock.integrations.accelerate import PipelineAccelerator
from penstock.integrations.transformers import PipelineTrainer
from tests.integrations import accelerated
from tests.integrations.trainers import (
    PAIRS,
    SENTENCES,
    SIZES,
    WORDS,
    Distilled,
    Examples,
    Weighted,
    answering,
    make,
    make_model,
    questions,
    squared,
    texts,
    words,
)


def outcome_of(
    trainer: Any, setting: Setting, evaluates: bool = True, resume: str | None = None
) -> Outcome:
    trainer.train(resume_from_checkpoint=resume)
    metrics = trainer.evaluate() if evaluates else {}
    log = trainer.state.log_history
    numbers = {
        f"{place} {key}": value
        for place, row in enumerate(log)
        for key, value in {**row, **metrics}.items()
        if isinstance(value, float | int)
        and not key.endswith(("runtime", "per_second", "total_flos", "_flops", "step_time"))
    }
    losses = [row["loss"] for row in log if "loss" in row]
    state = (
        trainer.pipe.weights.state_dict(full=True) if setting.cut else trainer.model.state_dict()
    )
    return Outcome(losses, numbers, state)


def trainer_of(
    setting: Setting, family: str = "gpt2", kind: Any = Trainer, steps: int = STEPS, **options: Any
) -> Any:
    """The Trainer, or a subclass; ``model=`` may be a function that makes it."""
    pipeline = options.pop("pipeline", {})
    if setting.cut:
        kind = type(f"Pipeline{kind.__name__}", (PipelineTrainer, kind), {})
        options["pipeline"] = setting.options(**pipeline)
    model = options.get("model")
    if model is not None and not isinstance(model, nn.Module):
        options["model"] = model()
    return make(kind, family, setting.folder, steps, batch=setting.each, **options)


def train(setting: Setting, *args: Any, evaluates: bool = True, **options: Any) -> Outcome:
    """Twenty steps of the Trainer, or of a subclass."""
    if options.pop("batched", False):
        options["compute_metrics"] = Counted()
    resume = options.pop("resume", None)
    return outcome_of(trainer_of(setting, *args, **options), setting, evaluates, resume)


class Counted:
    """Counts right answers from batch to batch."""

    def __init__(self) -> None:
        self.right = self.all = 0

    def __call__(self, batch: Any, compute_result: bool = False) -> dict[str, float]:
        self.right += int((batch.predictions.argmax(-1) == batch.label_ids).sum())
        self.all += len(batch.label_ids)
        found = {
            "accuracy": self.right / self.all,
            "inputs": float(batch.inputs["input_ids"].sum()),
        }
        if compute_result:
            self.right = self.all = 0
        return found if compute_result else {}


def add(name: str, **options: Any) -> None:
    @program("Trainer", name)
    def _(setting: Setting) -> Outcome:
        return train(setting, **options)


add("gpt2")
add("bert, classes", family="bert")
add("t5", family="t5")
add("vit", family="vit")
add("label_smoothing_factor", family="llama", arguments={"label_smoothing_factor": 0.1})
add("compute_loss_func", family="llama", compute_loss_func=squared)
add("bf16", family="llama", arguments={"bf16": True})
add("adafactor, cosine", arguments={"optim": "adafactor", "lr_scheduler_type": "cosine"})
add("activation_checkpointing", arguments={"activation_checkpointing": True})
add("group_by_length", arguments={"train_sampling_strategy": "group_by_length"})
add("neftune_noise_alpha", arguments={"neftune_noise_alpha": 5.0})
add("torch_compile", arguments={"torch_compile": True})
add("bf16, label_smoothing_factor", family="llama",
    arguments={"bf16": True, "label_smoothing_factor": 0.1})  # fmt: skip
add("bf16, compute_loss_func", family="llama", compute_loss_func=squared, arguments={"bf16": True})
add("fp16", family="llama", arguments={"fp16": True})
add("max_grad_norm=0, sgd", arguments={"max_grad_norm": 0.0, "optim": "sgd"})
add("adamw_torch_fused, reduce_lr_on_plateau", arguments={
    "optim": "adamw_torch_fused", "lr_scheduler_type": "reduce_lr_on_plateau",
    "eval_strategy": "steps", "eval_steps": 5,
})  # fmt: skip
add("warmup_stable_decay, eval_on_start", arguments={
    "lr_scheduler_type": "warmup_stable_decay", "eval_on_start": True, "eval_strategy": "epoch",
    "lr_scheduler_kwargs": {"num_decay_steps": 5},
})  # fmt: skip
add("batch_eval_metrics, include_for_metrics", family="bert", batched=True, arguments={
    "batch_eval_metrics": True, "include_for_metrics": ["loss", "inputs"],
})  # fmt: skip
add("preprocess_logits_for_metrics, eval_accumulation_steps", family="bert",
    preprocess_logits_for_metrics=lambda logits, labels: logits * 2,
    arguments={"eval_accumulation_steps": 1})  # fmt: skip
add("prediction_loss_only", measures=False, arguments={"prediction_loss_only": True})
add("dataloader_drop_last, num_train_epochs", arguments={
    "dataloader_drop_last": True, "max_steps": -1, "num_train_epochs": 2})  # fmt: skip
add("gradient_checkpointing", arguments={"gradient_checkpointing": True})
add("average_tokens_across_devices=False", arguments={"average_tokens_across_devices": False})
add("auto_find_batch_size", arguments={"auto_find_batch_size": True})
add("eval_use_gather_object", arguments={"eval_use_gather_object": True})
add("optimizers=(a function of the weights)", optimizer_cls_and_kwargs=(
    torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}))  # fmt: skip
add("save_total_limit, save_only_model", arguments={
    "save_strategy": "steps", "save_steps": 5, "save_total_limit": 1, "save_only_model": True})  # fmt: skip
add(
    "load_best_model_at_end, EarlyStoppingCallback", family="bert",
    arguments={
        "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 5, "save_steps": 5,
        "load_best_model_at_end": True, "learning_rate": 0.1,
    },
)  # fmt: skip


add("compute_loss with class weights", family="bert", kind=Weighted)
add("compute_loss with a teacher", family="llama", kind=Distilled)


def special(setting: Setting, model: Any, rows: Any, **options: Any) -> Outcome:
    """A model with data of its own."""
    return train(setting, model=model, rows=(rows, rows[:16]), measures=False, **options)


@program("Trainer", "question answering")
def _(setting: Setting) -> Outcome:
    return special(setting, answering(), questions(64))


@program("Trainer", "resume_from_checkpoint")
def _(setting: Setting) -> Outcome:
    arguments = {"save_strategy": "steps", "save_steps": 10}
    first = train(setting, arguments=arguments)
    torch.manual_seed(3)
    again = type(setting)(
        setting.cut, setting.processes, setting.replicas, setting.index, setting.folder
    )
    second = train(again, arguments=arguments, resume=str(setting.folder / "checkpoint-10"))
    return Outcome(first.losses + second.losses, second.metrics, second.weights)


@program("Trainer", "Seq2SeqTrainer, predict_with_generate")
def _(setting: Setting) -> Outcome:
    kind: Any = transformers.Seq2SeqTrainer
    more: dict[str, Any] = {}
    if setting.cut:
        kind = type("PipelineSeq2Seq", (PipelineTrainer, kind), {})
        more["pipeline"] = setting.options()
    arguments = transformers.Seq2SeqTrainingArguments(
        str(setting.folder), max_steps=STEPS, logging_steps=1, report_to=[], use_cpu=True,
        per_device_train_batch_size=setting.each, per_device_eval_batch_size=setting.each,
        save_strategy="no", disable_tqdm=True, predict_with_generate=True, generation_max_length=6,
    )  # fmt: skip
    rows = [Examples("text", 64, 1)[at] for at in range(64)]
    trainer = kind(
        model=make_model("t5"), args=arguments, train_dataset=rows, eval_dataset=rows[:16],
        compute_metrics=lambda p: {"sum": float(p.predictions.sum())}, **more,
    )  # fmt: skip
    return outcome_of(trainer, setting)


class Logs(transformers.TrainerCallback):
    """Reads weights, as callbacks of one's own do."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.norm = float(sum(p.detach().norm() for p in kwargs["model"].parameters()))


add("a callback that reads weights", callbacks=[Logs()])


@program("Trainer", "save_model on one process alone")
def _(setting: Setting) -> Outcome:
    trainer: Any = None

    class Saves(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero and state.global_step == 2:
                trainer.save_model(str(setting.folder / "saved"))

    trainer = trainer_of(setting, steps=4, callbacks=[Saves()], pipeline={"timeout": 6.0})
    return outcome_of(trainer, setting)


@program("Trainer", "CLIP, return_loss=True")
def _(setting: Setting) -> Outcome:
    text = {**SIZES, "num_attention_heads": 2, "vocab_size": WORDS, "max_position_embeddings": 16,
            "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}  # fmt: skip
    vision = {**SIZES, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    torch.manual_seed(0)
    model = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    )
    data = Examples("image", 64, 1)
    rows = [
        {"input_ids": data.tokens[at], "pixel_values": data.pixels[at], "return_loss": True}
        for at in range(64)
    ]

    def collate(samples: Any) -> Any:
        stacked = {
            key: torch.stack([row[key] for row in samples]) for key in ("input_ids", "pixel_values")
        }
        return stacked | {"return_loss": True}

    return special(setting, model, rows, data_collator=collate, evaluates=False)


@program("Trainer", "Mixtral, output_router_logits")
def _(setting: Setting) -> Outcome:
    torch.set_default_dtype(torch.float32)  # its experts do not compute in float64
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **SIZES, num_attention_heads=2, num_key_value_heads=2, vocab_size=WORDS,
            num_local_experts=2, num_experts_per_tok=1, output_router_logits=True,
        )
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in Examples("text", 64, 1).tokens]
    return special(setting, model, rows)


# ---- adapters of PEFT


def adapted(config: Any) -> Any:
    def model() -> Any:
        base = make_model("llama")
        torch.manual_seed(1)
        return peft.get_peft_model(base, config)

    return model


ADAPTERS: dict[str, Any] = {
    "LoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]),
    "DoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], use_dora=True),
    "IA3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": lambda: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16
    ),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "LoRA, modules_to_save": lambda: peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["v_proj"], modules_to_save=["lm_head"]
    ),
    "rsLoRA, all-linear, dropout=0": lambda: peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules="all-linear", use_rslora=True
    ),
    "VeRA": lambda: peft.VeraConfig(task_type="CAUSAL_LM", target_modules=["o_proj"], r=4),
    "LoHa": lambda: peft.LoHaConfig(task_type="CAUSAL_LM", target_modules=["v_proj"], r=4),
    "OFT": lambda: peft.OFTConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], oft_block_size=8
    ),
    "LN tuning": lambda: peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["norm"]),
    "AdaLoRA": lambda: peft.AdaLoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], init_r=4, target_r=2, total_step=STEPS
    ),
}  # fmt: skip
# The Trainer adds AdaLoRA's own term once for each batch that it accumulates.
ONE = {"gradient_accumulation_steps": 1}
for _name, _config in ADAPTERS.items():

    @program("Trainer", f"PEFT {_name}")
    def _(setting: Setting, config: Any = _config) -> Outcome:
        options: Any = {"arguments": ONE} if config is ADAPTERS["AdaLoRA"] else {}
        return train(setting, "llama", model=adapted(config()), measures=False, **options)


@program("Trainer", "PEFT LoRA, a frozen base in bfloat16")
def _(setting: Setting) -> Outcome:
    def model() -> Any:
        base = make_model("llama").to(torch.bfloat16)
        torch.manual_seed(1)
        return peft.get_peft_model(base, ADAPTERS["LoRA"]())

    return train(setting, "llama", model=model, measures=False)


@program("Trainer", "PEFT save_model, and loaded by PeftModel")
def _(setting: Setting) -> Outcome:
    model = adapted(ADAPTERS["LoRA, modules_to_save"]())
    trainer = trainer_of(setting, "llama", model=model, measures=False)
    outcome = outcome_of(trainer, setting)
    trainer.save_model(str(setting.folder / "adapter"))
    trainer.accelerator.wait_for_everyone()
    loaded = peft.PeftModel.from_pretrained(make_model("llama"), setting.folder / "adapter")
    state: Any = peft.get_peft_model_state_dict(loaded)
    states = trainer.optimizer.state_dict()["state"]
    if setting.cut:
        whole = trainer.pipe.weights.optimizer_state_dict(trainer.optimizer.optimizer, full=True)
        states = whole.get("state", {})
    return Outcome(outcome.losses, {"learning": len(states)}, state)


def merged_weight(model: Any, folder: Path) -> dict[str, Any]:
    return {"merged": model.merge_and_unload().model.layers[0].self_attn.q_proj.weight.detach()}


def saved_adapter(model: Any, folder: Path) -> dict[str, Any]:
    model.save_pretrained(folder / "adapter")
    return load_file(folder / "adapter/adapter_model.safetensors")


AFTERWARDS: dict[str, Any] = {
    "merge_and_unload": merged_weight,
    "get_peft_model_state_dict": lambda model, _: peft.get_peft_model_state_dict(model),
    "model.save_pretrained": saved_adapter,
}
"""What users do with an adapter after training; functions of the model and a folder, which give tensors."""
for _name, _look in AFTERWARDS.items():

    @program("Trainer", f"PEFT {_name} after training")
    def _(setting: Setting, look: Any = _look) -> Outcome:
        model = adapted(ADAPTERS["LoRA"]())()
        outcome = train(setting, "llama", model=model, measures=False)
        sums = {name: float(value.sum()) for name, value in look(model, setting.folder).items()}
        return Outcome(outcome.losses, sums, {})


# ---- trainers of TRL

MESSAGES = [
    [{"role": "user", "content": a}, {"role": "assistant", "content": b}]
    for a, b in zip(texts(SENTENCES[:, :4]), texts(SENTENCES[:, 4:]), strict=True)
]
CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def reinforced(setting: Setting, kind: Any, config: Any, columns: Any, **options: Any) -> Outcome:
    """Some steps of a trainer of TRL."""
    data = Dataset.from_dict(columns)
    more, evaluates = options.pop("trainer", dict)(), options.pop("evaluates", False)
    options = {"max_steps": STEPS, **options}
    if setting.cut:
        kind = type(f"Pipeline{kind.__name__}", (PipelineTrainer, kind), {})
        more["pipeline"] = setting.options()
    args = config(
        str(setting.folder), per_device_train_batch_size=setting.each,
        per_device_eval_batch_size=setting.each, logging_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", bf16=False, gradient_checkpointing=False, disable_tqdm=True, **options,
    )  # fmt: skip
    tokenizer = words()
    tokenizer.chat_template = CHAT
    if evaluates:
        more["eval_dataset"] = data.select(range(16))
    trainer = kind(
        args=args, train_dataset=data, processing_class=tokenizer,
        **{"model": make_model("llama"), **more},
    )  # fmt: skip
    # Replicas that sample draw other numbers than each other, and the same as in two processes.
    torch.manual_seed(7 + setting.index)
    return outcome_of(trainer, setting, evaluates)


def add_trl(name: str, kind: Any, config: Any, columns: Any, **options: Any) -> None:
    @program("Trainer", f"TRL {name}")
    def _(setting: Setting) -> Outcome:
        return reinforced(setting, kind, config, columns, **options)


ROWS = {"input_ids": SENTENCES.tolist()}
add_trl("SFT", trl.SFTTrainer, trl.SFTConfig, ROWS, evaluates=True)
add_trl("SFT, packing", trl.SFTTrainer, trl.SFTConfig, ROWS, packing=True, max_length=16)
add_trl("SFT, loss_type='dft'", trl.SFTTrainer, trl.SFTConfig, ROWS, loss_type="dft")
add_trl(
    "SFT, LoRA", trl.SFTTrainer, trl.SFTConfig, ROWS,
    trainer=lambda: {"peft_config": ADAPTERS["LoRA"]()},
)  # fmt: skip
add_trl(
    "DPO", trl.DPOTrainer, trl.DPOConfig, PAIRS,
    trainer=lambda: {"ref_model": make_model("llama", seed=3)},
)  # fmt: skip
add_trl(
    "KTO", trl.KTOTrainer, trl.KTOConfig,
    {"prompt": PAIRS["prompt"], "completion": PAIRS["chosen"], "label": [True, False] * 16},
    trainer=lambda: {"ref_model": make_model("llama", seed=3)},
)  # fmt: skip
add_trl("ORPO", ORPOTrainer, ORPOConfig, PAIRS)
add_trl("CPO", CPOTrainer, CPOConfig, PAIRS)


def scorer() -> Any:
    torch.manual_seed(0)
    config = make_model("llama").config
    config.num_labels = 1
    torch.manual_seed(0)
    scores: Any = transformers.LlamaForSequenceClassification
    return scores(config)


add_trl(
    "Reward", trl.RewardTrainer, trl.RewardConfig,
    {"chosen": PAIRS["chosen"], "rejected": PAIRS["rejected"]}, trainer=lambda: {"model": scorer()},
)  # fmt: skip


def rewards(completions: Any, **_: Any) -> list[float]:
    return [float(len({*text.split()}) - text.count("w4")) for text in completions]


SAMPLED: dict[str, Any] = {
    "num_generations": 4, "max_completion_length": 5, "max_steps": 4, "temperature": 1.0,
}  # fmt: skip
PROMPTS = {"prompt": PAIRS["prompt"]}
for _name, _kind, _settings in (
    ("GRPO", trl.GRPOTrainer, trl.GRPOConfig), ("RLOO", trl.RLOOTrainer, trl.RLOOConfig),
):  # fmt: skip
    # With a beta, RLOO would load its reference from the hub.
    add_trl(
        _name, _kind, _settings, PROMPTS, **SAMPLED, beta=0.0,
        trainer=lambda: {"reward_funcs": rewards},
    )  # fmt: skip


def by_an_engine(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions of an inference engine, which gets the weights before: here a model in each process."""
    engine: Any = make_model("llama").eval()
    pipe = getattr(trainer, "pipe", None)
    if pipe is None:
        weights = trainer.model.state_dict()
    else:
        weights = {name: tensor.clone() for name, tensor in pipe.weights.stream(4096, to="all")}
    engine.load_state_dict(weights)
    asked = [trainer.processing_class(text)["input_ids"] for text in prompts]
    done, logprobs = [], []
    for place, ids in enumerate(asked):
        row, of = torch.tensor([ids]), []
        draws = torch.Generator().manual_seed(1000 * trainer.state.global_step + place)
        for _ in range(trainer.max_completion_length):
            with torch.no_grad():
                chances = engine(row).logits[0, -1].softmax(-1)
            token = torch.multinomial(chances, 1, generator=draws)
            of.append(float(chances[token].log()))
            row = torch.cat([row, token[None]], 1)
        done.append(row[0, len(ids) :].tolist())
        logprobs.append(of)
    return {"prompt_ids": asked, "completion_ids": done, "logprobs": logprobs}


add_trl(
    "GRPO, an engine", trl.GRPOTrainer, trl.GRPOConfig, PROMPTS, **SAMPLED, beta=0.0,
    trainer=lambda: {"reward_funcs": rewards, "rollout_func": by_an_engine},
)  # fmt: skip
add_trl(
    "GRPO, beta and LoRA", trl.GRPOTrainer, trl.GRPOConfig, PROMPTS, **SAMPLED, beta=0.1,
    trainer=lambda: {"reward_funcs": rewards, "peft_config": ADAPTERS["LoRA"]()},
)  # fmt: skip
add_trl(
    "DPO, LoRA", trl.DPOTrainer, trl.DPOConfig, PAIRS, evaluates=True,
    trainer=lambda: {"peft_config": ADAPTERS["LoRA"]()},
)  # fmt: skip
for _loss in ("ipo", "hinge", "sigmoid_norm"):
    add_trl(
        f"DPO, loss_type={_loss!r}", trl.DPOTrainer, trl.DPOConfig, PAIRS, loss_type=_loss,
        trainer=lambda: {"ref_model": make_model("llama", seed=3)},
    )  # fmt: skip
add_trl(
    "Distillation", trl.DistillationTrainer, trl.DistillationConfig,
    {"prompt": PAIRS["prompt"], "completion": PAIRS["chosen"]},
    trainer=lambda: {"teacher_model": make_model("llama", seed=3)},
)  # fmt: skip
add_trl(
    "GKD", GKDTrainer, GKDConfig, {"messages": MESSAGES}, lmbda=0.0,
    trainer=lambda: {"teacher_model": make_model("llama", seed=3)},
)  # fmt: skip


# ---- Accelerate


def accelerate(
    setting: Setting,
    loader: Any = None,
    *,
    saves: bool = False,
    objects: bool = False,
    net: Any = None,
    schedule: Any = lambda made, _: torch.optim.lr_scheduler.StepLR(made, 5, 0.5),
    **options: Any,
) -> Outcome:
    """Batches of eight through Accelerate's loop."""
    torch.manual_seed(0)
    model: Any = net if net is not None else accelerated.make()
    settings = {"cpu": True, **options}
    if setting.cut:
        pipe = setting.pipeline(model, loss_fn=cross_entropy)
        accelerator: Any = PipelineAccelerator(pipe, **settings)
        model = PipelineModule(pipe)
    else:
        accelerator = Accelerator(**settings)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    made: Any = schedule(optimizer, accelerator.num_processes)
    batches = (
        loader(setting) if loader else DataLoader(data(), batch_size=setting.each, shuffle=True)
    )
    model, optimizer, made, batches = accelerator.prepare(model, optimizer, made, batches)
    losses: list[float] = []
    norms: list[float] = []
    items: list[int] = []
    while len(losses) < STEPS:
        for x, target in batches:
            with accelerator.accumulate(model), accelerator.autocast():
                loss = model(x, target=target) if setting.cut else cross_entropy(model(x), target)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
                optimizer.step()
                made.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            given = target.tolist() if objects else target
            items.append(len(accelerator.gather_for_metrics(given, use_gather_object=objects)))
        if saves and len(losses) < STEPS:
            accelerator.save_state(setting.folder / "state")
            accelerator.wait_for_everyone()
            accelerator.load_state(setting.folder / "state")
    accelerator.save_model(model, setting.folder / "saved")
    accelerator.wait_for_everyone()
    metrics = {f"norm {p}": n for p, n in enumerate(norms)}
    metrics |= {"items": sum(items), "lr": optimizer.param_groups[0]["lr"]}
    return Outcome(losses, metrics, accelerator.get_state_dict(model))


def data() -> TensorDataset:
    x, y = accelerated.data().tensors
    return TensorDataset(x.to(torch.get_default_dtype()), y)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([data()[place] for place in range(32)])


def shuffled(setting: Setting) -> DataLoader[Any]:
    return DataLoader(data(), batch_size=setting.each)


def streamed(setting: Setting) -> DataLoader[Any]:
    return DataLoader(Stream(), batch_size=setting.each)


@program("Accelerate", "clip, schedule")
def _(setting: Setting) -> Outcome:
    return accelerate(setting, shuffled)


@program("Accelerate", "shuffled loader")
def _(setting: Setting) -> Outcome:
    return accelerate(setting)


@program("Accelerate", "gradient_accumulation_steps=2")
def _(setting: Setting) -> Outcome:
    return accelerate(setting, shuffled, gradient_accumulation_steps=2)


@program("Accelerate", "save_state and load_state")
def _(setting: Setting) -> Outcome:
    return accelerate(setting, shuffled, saves=True)


@program("Accelerate", "IterableDataset")
def _(setting: Setting) -> Outcome:
    return accelerate(setting, streamed)


@program("Accelerate", "dispatch_batches=True")
def _(setting: Setting) -> Outcome:
    config = DataLoaderConfiguration(dispatch_batches=True)
    return accelerate(setting, streamed, dataloader_config=config)


@program("Accelerate", "split_batches=True")
def _(setting: Setting) -> Outcome:
    config = DataLoaderConfiguration(split_batches=True)
    return accelerate(setting, lambda _: DataLoader(data(), batch_size=8), dataloader_config=config)


@program("Accelerate", "even_batches=False")
def _(setting: Setting) -> Outcome:
    config = DataLoaderConfiguration(even_batches=False)
    return accelerate(setting, shuffled, dataloader_config=config)


@program("Accelerate", "use_seedable_sampler=True")
def _(setting: Setting) -> Outcome:
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    return accelerate(setting, dataloader_config=config)


@program("Accelerate", "a last batch that is not full")
def _(setting: Setting) -> Outcome:
    rows = TensorDataset(*(tensor[:22] for tensor in data().tensors))
    return accelerate(setting, lambda s: DataLoader(rows, batch_size=s.each))


@program("Accelerate", "mixed_precision='bf16'")
def _(setting: Setting) -> Outcome:
    torch.set_default_dtype(torch.float32)
    return accelerate(setting, shuffled, mixed_precision="bf16")


@program("Accelerate", "OneCycleLR over max_steps * num_processes")
def _(setting: Setting) -> Outcome:
    def schedule(optimizer: Any, processes: int) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, STEPS * processes)

    return accelerate(setting, shuffled, schedule=schedule)


@program("Accelerate", "gather_for_metrics(use_gather_object=True)")
def _(setting: Setting) -> Outcome:
    rows = TensorDataset(*(tensor[:22] for tensor in data().tensors))
    return accelerate(setting, lambda s: DataLoader(rows, batch_size=s.each), objects=True)


@program("Accelerate", "save_state with a tied weight, save_model")
def _(setting: Setting) -> Outcome:
    net: Any = accelerated.make().double()
    net[3][0].weight = net[1][0].weight
    outcome = accelerate(setting, shuffled, saves=True, net=net)
    saved = load_file(setting.folder / "saved/model.safetensors")
    return Outcome(outcome.losses, outcome.metrics, {**outcome.weights, **saved})


@program("Accelerate", "unwrap_model(model).save_pretrained")
def _(setting: Setting) -> Outcome:
    net = make_model("llama")
    accelerator: Any = Accelerator(cpu=True)
    model: Any = net
    if setting.cut:
        pipe = setting.pipeline(net)
        accelerator, model = PipelineAccelerator(pipe, cpu=True), PipelineModule(pipe)
    made: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = TensorDataset(Examples("text", 64, 1).tokens)
    loader: Any = DataLoader(tokens, batch_size=setting.each)
    model, made, loader = accelerator.prepare(model, made, loader)
    losses = []
    for (rows,) in loader:
        loss = model(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        made.step()
        made.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    accelerator.unwrap_model(model).save_pretrained(
        setting.folder / "model", is_main_process=accelerator.is_main_process,
        save_function=accelerator.save, state_dict=accelerator.get_state_dict(model),
    )  # fmt: skip
    accelerator.wait_for_everyone()
    saved = transformers.LlamaForCausalLM.from_pretrained(setting.folder / "model", dtype="auto")
    return Outcome(losses, {}, saved.state_dict())


@program("Accelerate", "a plain Accelerator around PipelineModule")
def _(setting: Setting) -> Outcome:
    net: Any = accelerated.make()
    if setting.cut:
        net = PipelineModule(setting.pipeline(net, loss_fn=nn.functional.cross_entropy))
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(net)
    x, y = data().tensors
    loss = model(x, target=y) if setting.cut else cross_entropy(model(x), y)
    return Outcome([float(loss.detach())])
