"""The Trainer of transformers, as a pipeline and without.

``make campaign ARGS=loops`` runs many more families, options, adapters and trainers.
"""

from __future__ import annotations

import importlib
import json
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

from penstock.errors import UsageError
from penstock.integrations.transformers import PipelineTrainer
from tests.integrations.trainers import (
    PAIRS,
    SENTENCES,
    Distilled,
    Examples,
    Weighted,
    answering,
    make,
    make_model,
    questions,
    report,
    saved,
    squared,
    words,
)
from tests.processes import run_script

pytestmark = pytest.mark.filterwarnings("ignore")


STEPS = 4


@cache
def plain(family: str, steps: int = STEPS, evaluated: int = 16) -> dict[str, Any]:
    """What the Trainer itself gives."""
    folder = Path(mkdtemp())
    return report(make(Trainer, family, folder, steps, evaluated=evaluated), folder)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-3)
    assert found["eval"] == pytest.approx(expected["eval"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "schedule"),
    [("vit", "ZB-V"), pytest.param("t5", "1F1B", marks=pytest.mark.nightly)],
)
def test_in_one_process(family: str, schedule: str, tmp_path: Path) -> None:
    pipeline = {"schedule": schedule, "ranks": 2, "microbatches": 4}
    trainer = make(PipelineTrainer, family, tmp_path, STEPS, pipeline=pipeline)
    assert_equal(report(trainer, tmp_path), plain(family))
    weights = trainer.pipe.weights.state_dict()
    for name, parameter in saved(family, tmp_path).named_parameters():
        assert torch.equal(parameter, weights[name])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_in_processes_and_resumed_in_one(tmp_path: Path) -> None:
    """Two pipelines of two processes, which see other batches than each other; then one of two ranks."""
    expected = plain("gpt2", STEPS, 20)
    command = ["-m", "tests.integrations.trainers", str(tmp_path), str(STEPS)]
    ran = run_script(*command, processes=4, limit=350.0)
    assert [one.status for one in ran] == [0] * 4, ran
    # One rank prints what is logged.
    assert ["'loss'" in one.out for one in ran] == [True, False, False, False]
    found = json.loads((tmp_path / "report.json").read_text())
    assert_equal(found, expected)
    tokens = Examples("text", 4, 3).tokens
    assert found["tokens"] == saved("gpt2", tmp_path).generate(tokens, max_new_tokens=8).tolist()
    pipeline = {"schedule": "1F1B", "ranks": 2, "microbatches": 2}
    trainer = make(
        PipelineTrainer, "gpt2", tmp_path / "again", STEPS, pipeline=pipeline, evaluated=20
    )
    # The log of the checkpoint comes first.
    resumed = report(trainer, tmp_path, str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert_equal(resumed, expected)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"compute_loss_func": squared, "arguments": {"optim": "adafactor"}},
            id="a loss of the user's own and another optimizer",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"arguments": {"label_smoothing_factor": 0.1, "activation_checkpointing": True}},
            id="label smoothing and checkpointing",
        ),
        pytest.param({"arguments": {"bf16": True}}, id="bf16", marks=pytest.mark.nightly),
    ],
)
def test_what_is_asked_for_is_what_the_trainer_does(options: Any, tmp_path: Path) -> None:
    found = report(
        make(PipelineTrainer, "llama", tmp_path, 2, pipeline={"ranks": 2}, **options), tmp_path
    )
    expected = report(make(Trainer, "llama", tmp_path, 2, **options), tmp_path)
    gap = 2e-3 if "bf16" in str(options) else 1e-5
    assert found["loss"] == pytest.approx(expected["loss"], abs=gap)
    assert found["eval"] == pytest.approx(expected["eval"], abs=10 * gap)


def test_the_best_model_is_loaded_and_predicts(tmp_path: Path) -> None:
    often = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    best = {"load_best_model_at_end": True, "save_total_limit": 1}
    arguments = {**often, **best, "learning_rate": 0.3}
    predictions = []
    kinds: dict[type[Trainer], Any] = {Trainer: {}, PipelineTrainer: {"pipeline": {"ranks": 2}}}
    for kind, options in kinds.items():
        folder = tmp_path / kind.__name__
        trainer = make(kind, "bert", folder, 6, arguments=arguments, **options)
        trainer.train()
        assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"
        predictions.append(trainer.predict(Examples("class", 12, 5)).predictions)
    assert predictions[0] == pytest.approx(predictions[1], abs=1e-4)


def test_a_callback_stops_a_run(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert kwargs["model"] is trainer.model
            control.should_training_stop = state.global_step == 2

    options: dict[str, Any] = {"pipeline": {"ranks": 2}, "callbacks": [Stop()]}
    trainer = make(PipelineTrainer, "vit", tmp_path, 6, **options)
    trainer.train()
    assert trainer.state.global_step == 2


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"optimizers": (True, None)}, "optimizer_cls_and_kwargs"),
    ({"arguments": {"torch_compile": True}}, "'compile': True"),
    ({"arguments": {"neftune_noise_alpha": 5.0}}, "neftune_noise_alpha cannot be used"),
    ({"arguments": {"auto_find_batch_size": True}}, "choose a batch size"),
]


def test_what_a_pipeline_cannot_do_is_refused(tmp_path: Path) -> None:
    for options, message in WRONG:
        with pytest.raises(UsageError, match=message):
            make(PipelineTrainer, "vit", tmp_path, 2, pipeline={"ranks": 2}, **options)


def test_a_loss_that_uses_the_weights_of_the_head_is_refused_by_its_trainers_name(
    tmp_path: Path,
) -> None:
    class Distils(PipelineTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model(**inputs).logits @ model.get_output_embeddings().weight

    with pytest.raises(UsageError, match=r"Distils, whose compute_loss.* cannot be used"):
        make(Distils, "llama", tmp_path, 2, pipeline={"ranks": 2})


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path: Path) -> None:
    make(Trainer, "vit", tmp_path, 2, arguments={"save_strategy": "steps", "save_steps": 2}).train()
    trainer = make(PipelineTrainer, "vit", tmp_path, 4, pipeline={"ranks": 2})
    # Also one of ours that was killed before its run was whole.
    for folder in ("penstock", "penstock/.writing-2-0123456789ab"):
        with pytest.raises(UsageError, match="saved by another"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        (tmp_path / "checkpoint-2" / folder).mkdir()


def test_the_newest_complete_checkpoint_is_resumed(tmp_path: Path) -> None:
    class Counts(TrainerCallback):
        steps = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.steps += 1

    counts: list[int] = []
    for _ in range(2):
        counter = Counts()
        options: dict[str, Any] = {"pipeline": {"ranks": 2}, "callbacks": [counter]}
        saves = {"save_strategy": "steps", "save_steps": 1}
        make(PipelineTrainer, "vit", tmp_path, 3, arguments=saves, **options).train("auto")
        counts.append(counter.steps)
        # As if a kill had come while the last one was written.
        (tmp_path / "checkpoint-3" / "trainer_state.json").unlink()
    assert counts == [3, 1]


def test_without_accelerate_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate.utils", None)
    monkeypatch.delitem(sys.modules, "penstock.integrations.transformers")
    with pytest.raises(ImportError, match=r"pip install 'penstock-pipeline\[transformers\]'"):
        importlib.import_module("penstock.integrations.transformers")


# ---- trainers with a loss of their own


class PipelineWeighted(PipelineTrainer, Weighted):
    pass


class PipelineDistilled(PipelineTrainer, Distilled):
    pass


@pytest.mark.parametrize(
    ("family", "plain_kind", "kind"),
    [
        pytest.param("bert", Weighted, PipelineWeighted, marks=pytest.mark.nightly),
        ("llama", Distilled, PipelineDistilled),
    ],
)
def test_a_loss_of_another_trainer_runs_as_it_is_written(
    family: str, plain_kind: Any, kind: Any, tmp_path: Path
) -> None:
    found = report(make(kind, family, tmp_path, 3, pipeline={"ranks": 2}), tmp_path)
    assert_equal(found, report(make(plain_kind, family, tmp_path, 3), tmp_path))


@pytest.mark.nightly
def test_answers_to_questions_have_other_labels(tmp_path: Path) -> None:
    rows, reports = questions(21), []
    kinds: list[tuple[Any, dict[str, Any]]]
    kinds = [(Trainer, {}), (PipelineTrainer, {"pipeline": {"ranks": 2}})]
    for kind, options in kinds:
        options |= {"model": answering(), "rows": (rows, rows), "measures": False}
        trainer = make(kind, "bert", tmp_path, 3, **options)
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        reports.append([*losses, trainer.evaluate()["eval_loss"]])
    assert reports[0] == pytest.approx(reports[1], abs=1e-5)


# ---- adapters of PEFT, and trainers of TRL


@pytest.mark.slow
def test_adapters_are_trained_and_saved_as_peft_does(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    reports, states = [], []
    kinds: dict[Any, dict[str, Any]] = {Trainer: {}, PipelineTrainer: {"pipeline": {"ranks": 2}}}
    for kind, options in kinds.items():
        torch.manual_seed(1)
        model = peft.get_peft_model(make_model("llama"), adapter)
        trainer = make(kind, "llama", tmp_path, 3, model=model, measures=False, **options)
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        reports.append([*losses, evaluated])
        folder = tmp_path / kind.__name__
        trainer.save_model(str(folder))
        states.append(load_file(folder / "adapter_model.safetensors"))
        learned = trainer.optimizer.state_dict()["state"]
        assert len(learned) == sum(p.requires_grad for p in model.parameters())
    assert reports[0] == pytest.approx(reports[1], abs=1e-5)
    torch.testing.assert_close(states[1], states[0], atol=1e-5, rtol=1e-4)
    loaded = peft.PeftModel.from_pretrained(make_model("llama"), folder)
    assert peft.get_peft_model_state_dict(loaded).keys() == states[0].keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "columns", "options"),
    [
        pytest.param(
            *("SFT", {"input_ids": SENTENCES.tolist()}, {"packing": True, "max_length": 16}),
            marks=pytest.mark.nightly,
        ),
        ("DPO", PAIRS, {}),
    ],
    ids=["packed", "dpo"],
)
def test_trainers_of_trl(kind: str, columns: Any, options: Any, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    plain_kind, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    both = type("Both", (PipelineTrainer, plain_kind), {})
    data, logs = datasets.Dataset.from_dict(columns), []
    for trainer_kind, more in ((plain_kind, {}), (both, {"pipeline": {"ranks": 2}})):
        args = config(
            str(tmp_path), max_steps=2, per_device_train_batch_size=8, logging_steps=1,
            report_to=[], use_cpu=True, save_strategy="no", bf16=False,
            gradient_checkpointing=False, disable_tqdm=True, **options,
        )  # fmt: skip
        if kind == "DPO":
            more = {**more, "ref_model": make_model("llama", seed=3)}
        trainer = trainer_kind(
            make_model("llama"), args=args, train_dataset=data, eval_dataset=data.select(range(8)),
            processing_class=words(), **more,
        )  # fmt: skip
        trainer.train()
        trainer.evaluate()
        rows = trainer.state.log_history
        logs.append({
            f"{place} {key}": value
            for place, row in enumerate(rows)
            for key, value in row.items()
            if not key.endswith(("runtime", "per_second", "total_flos"))
        })  # fmt: skip
    assert logs[0] == pytest.approx(logs[1], abs=1e-4)
