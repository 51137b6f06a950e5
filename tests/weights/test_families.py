"""What is saved of models of transformers is what ``from_pretrained`` loads, and its Trainer goes on with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Trainer

from penstock import Checkpoints, Pipeline
from penstock.checkpoint import export
from penstock.cli.main import main
from penstock.errors import UsageError
from penstock.integrations.transformers import PipelineTrainer
from tests.checkpoint.runs import Keeps
from tests.integrations.trainers import FAMILIES, SIZES, TOKENS, make, make_model

pytestmark = pytest.mark.filterwarnings("ignore")
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
TEXT: dict[str, Any] = {**SIZES, **HEADS, **TOKENS, "max_position_embeddings": 64}
VISION: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}


def mixtral() -> Any:
    config = transformers.MixtralConfig(**TEXT, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(**TEXT, head_dim=8, num_local_experts=4)
    return transformers.GptOssForCausalLM(config)


def llava() -> Any:
    parts: dict[str, Any] = {
        "text_config": transformers.LlamaConfig(**TEXT),
        "vision_config": transformers.CLIPVisionConfig(**VISION),
        "image_token_id": 40,
    }
    config = transformers.LlavaConfig(**parts)
    return transformers.LlavaForConditionalGeneration(config)


def qwen_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision: dict[str, Any] = {"depth": 2, "hidden_size": 32, "num_heads": 4, "out_hidden_size": 32}
    vision |= {"intermediate_size": 48, "patch_size": 4, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope}, vision_config=vision, image_token_id=40
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


MAKE: dict[str, Callable[[], Any]] = {name: make for name, (make, _) in FAMILIES.items()}
MAKE |= {make.__name__: make for make in (mixtral, gpt_oss, llava, qwen_vl)}


def alike(model: Any, state: dict[str, Any]) -> bool:
    there = model.state_dict()
    return there.keys() == state.keys() and all(torch.equal(there[n], state[n]) for n in state)


@pytest.mark.parametrize("family", MAKE)
def test_families_are_loaded_from_what_was_saved(tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    model = MAKE[family]().bfloat16()
    if model.can_generate():
        model.generation_config.temperature = 0.5  # without do_sample, save_pretrained refuses it
    kind, pipe = type(model), Pipeline(model, ranks=2)
    pipe.weights.save(tmp_path / "saved")
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(0, loader=Keeps(1))  # the next one knows of the model nevertheless
        checkpoints.save(1, pipe=pipe)
    export(tmp_path / "run", tmp_path / "exported")
    state = pipe.weights.state_dict()
    for folder in (tmp_path / "saved", tmp_path / "exported"):
        loaded, info = kind.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        assert loaded.dtype is torch.bfloat16
        assert alike(loaded, state)
        assert loaded.can_generate() == (folder / "generation_config.json").exists()
    # And the other way round.
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    loaded.save_pretrained(tmp_path / "theirs")
    assert pipe.weights.load(tmp_path / "theirs") == ([], [])
    assert alike(loaded, pipe.weights.state_dict())


def tokenizer() -> Any:
    words = {f"w{number}": number for number in range(50)}
    whole = Tokenizer(WordLevel(words, unk_token="w0"))
    kind: Any = PreTrainedTokenizerFast
    return kind(tokenizer_object=whole, pad_token="w2")


def test_a_tokenizer_goes_along_and_a_plain_trainer_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    Pipeline(make_model("llama"), ranks=2).weights.save(folder, tokenizer())
    assert AutoTokenizer.from_pretrained(folder).decode([3, 4]) == "w3 w4"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    losses = []
    for model in (loaded, make_model("llama")):
        trainer = make(Trainer, "llama", tmp_path, 3, model=model)
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]


def test_what_a_trainer_writes_beside_the_weights(tmp_path: Path) -> None:
    options = {"pipeline": {"ranks": 2}, "processing_class": tokenizer()}
    trainer = make(PipelineTrainer, "llama", tmp_path, 1, **options)
    trainer.save_model(str(tmp_path / "saved"))
    files = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "training_args.bin"} < files
    assert "model.safetensors" not in files
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, pipe=trainer.pipe)
    command = ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "exported")]
    assert main([*command, "--processor", str(tmp_path / "nowhere")]) == 2
    assert main([*command, "--processor", str(tmp_path / "saved")]) == 0
    for name in ("saved", "exported"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert alike(loaded, trainer.pipe.weights.state_dict())
        assert AutoTokenizer.from_pretrained(tmp_path / name).decode([3, 4]) == "w3 w4"


def test_what_has_no_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"processing_class= was given a str, which has no save_pre"
    ):
        Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 2)), ranks=1).weights.save(
            tmp_path / "a", "t5"
        )
    assert not (tmp_path / "a").exists()
