"""Lightning's ``Trainer`` and ``Fabric`` on a pipeline.

The forward that is cut is the step itself: ``training_step(batch, batch_idx)`` of an unedited module, which
returns the loss. Processes, launcher and messages between processes come from Lightning's DDPStrategy, all of
which is used except DistributedDataParallel.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock._engine.microbatches import Rule, Split
from penstock._engine.parallel import meeting_in_time, pipelines_in, side_by_side
from penstock._engine.runtime import GracefulStop, Loss, LossWeight
from penstock._engine.weights.storage import file_name
from penstock.checkpoint import Checkpoints
from penstock.errors import PartitionError, UsageError
from penstock.integrations.module import PipelineModule, clip_whole
from penstock.pipeline import Outputs, Pipeline

try:
    from lightning.fabric.strategies.ddp import DDPStrategy as FabricProcesses
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import (
        BaseFinetuning,
        ModelCheckpoint,
        ModelPruning,
        StochasticWeightAveraging,
        WeightAveraging,
    )
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins.io import AsyncCheckpointIO
    from lightning.pytorch.strategies.ddp import DDPStrategy as TrainerProcesses
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError(
        "penstock.integrations.lightning needs Lightning: pip install 'penstock-pipeline[lightning]'"
    ) from error

from penstock.integrations.steps import LightningStep, StepLog, described, loss_in, samples_in

logger = logging.getLogger("penstock")

_OURS = {"loss_fn", "reduction", "device", "group", "mesh", "replicas"}
"""Arguments of a Pipeline that the step and Lightning's arguments determine."""
_PREFIX = "module."
"""What names in the pipeline begin with: the step holds the plain module under it."""
_REST = "lightning"
"""The name of the file, beside the weights, with what Lightning keeps."""


# ---- the module on its pipeline


@contextmanager
def _numbers_explained() -> Iterator[None]:
    """A context that says what to do where a step reads a number off a tensor."""
    try:
        yield
    except PartitionError as error:
        if "needs numbers of a tensor" in str(error):
            error.args = (
                f"{error}. To log or return a value, pass the tensor itself, as in "
                'self.log("loss", loss), without item() or float()',
            )
        raise


class _Steps(PipelineModule):
    """The steps of a module: what they return besides the loss has rows for the samples, in their order."""

    follows_outputs = False

    def output_rule(self, outputs: Outputs) -> Rule:
        """Each step's loss is in the result already."""
        return {"loss": lambda parts, sizes: None, "rest": Split(0)}


class _OnPipeline(nn.Module):
    """A module whose steps run on a pipeline, with the names and numbers of the plain module."""

    module: nn.Module
    _inner: PipelineModule

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        *,
        loss_weight: LossWeight | None = None,
        loss_check: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        first: dict[int, str] = {}
        named = module.named_parameters(remove_duplicate=False)
        # A shared weight goes by the first of its names, as it does in optimizers.
        self._first_names = {name: first.setdefault(id(tensor), name) for name, tensor in named}
        # Not as submodules: the plain module lists the parameters.
        vars(self)["module"] = module
        names = [self.names_in(optimizer) for optimizer in optimizers]
        weights = loss_weight.values() if isinstance(loss_weight, Mapping) else [loss_weight]
        self._weighs = any(map(callable, weights))
        self._log = StepLog(module)
        # It is checked here, together with what is logged.
        self._checks = loss_check
        loss = Loss(loss_in, weight=loss_weight, check=False)
        with self._log.without_metrics():
            self.pipe = Pipeline(LightningStep(module, self._log), loss_fn=loss, **options)
            vars(self)["_inner"] = _Steps(self.pipe)
        self._log.place(self.pipe)
        # The cut has put placeholders into the place of weights that other ranks hold.
        now = dict(module.named_parameters(remove_duplicate=False))
        for optimizer, of_groups in zip(optimizers, names, strict=True):
            for group, paths in zip(optimizer.param_groups, of_groups, strict=True):
                group["params"] = [now[path] for path in paths]

    # ---- steps

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Called by Fabric, which has put the step that the user called into the module's ``forward``."""
        asked = vars(self.module).get("forward")
        called = inspect.getclosurevars(asked).nonlocals if inspect.isfunction(asked) else {}
        if "method_name" not in called:
            return self.run("forward", args, kwargs)
        del vars(self.module)["forward"]
        return self.run(called["method_name"], args, kwargs)

    def run(self, step_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a step; return a loss whose backward adds the gradients, a plain loss, or a prediction."""
        trains = torch.is_grad_enabled() and (step_name != "forward" or self.training)
        kwargs = {**kwargs, "step_name": step_name}
        with (
            _numbers_explained(),
            self._log.during(step_name),
            # Lightning evaluates in inference mode, in which no code can be traced.
            torch.inference_mode(False),
            torch.set_grad_enabled(trains),
        ):
            if not trains and step_name in ("forward", "predict_step"):
                return self.pipe.predict(*args, same_batch=True, predicts=True, **kwargs)
            if self._weighs:
                kwargs["target"] = args[0]
            result, loss, output = self._inner.run_batch(
                *args, trains=trains, outputs=True, **kwargs
            )
            self._check(*args, **kwargs)
        samples = samples_in(args, kwargs) if self._weighs else round(result.weight)
        with torch.set_grad_enabled(trains):
            rest = self._log.pass_on(output["rest"], result, samples)
        if self._log.returned is None:
            return rest
        return {"loss": loss, **(rest or {})} if issubclass(self._log.returned, Mapping) else loss

    def _check(self, *args: Any, **kwargs: Any) -> None:
        """In the first step of a kind: check whether its loss and numbers are means over samples.

        Raises:
            UsageError: the loss is not.
        """
        step_name = kwargs["step_name"]
        apart = self._inner.check_once(step_name, None, *args, **kwargs) if self._checks else {}
        for name, (whole, halves) in apart.items() if self.pipe.is_main_process else ():
            logger.warning(
                "penstock: %s of %s is %.6g for the first microbatch, and %.6g as the mean of its halves: "
                "the mean over microbatches is not what it is for the batch. Return what it is computed "
                "from, and compute it in the hook after the step, which gets the whole batch",
                described(name), step_name, whole, halves,
            )  # fmt: skip

    # ---- weights, and the states of optimizers

    def state(self) -> dict[str, Any]:
        """The module's state dict on rank 0, an empty one on the others; every rank calls it."""
        with self.pipe.job.calling("save_checkpoint"):
            state = self.pipe.weights.state_dict(full=True)
        return {name.removeprefix(_PREFIX): value for name, value in state.items()}

    def load(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Load the module's state dict: each rank loads what it holds."""
        self.pipe.weights.load_state_dict(
            {_PREFIX + n: of for n, of in state.items()}, strict=strict
        )

    def names_in(self, optimizer: Optimizer) -> list[list[str]]:
        """For each group of an optimizer, the names of its parameters in the plain module.

        Raises:
            UsageError: it has other parameters.
        """
        named = self.module.named_parameters(remove_duplicate=False)
        names = {id(parameter): self._first_names[name] for name, parameter in named}
        groups = [group["params"] for group in optimizer.param_groups]
        if any(id(parameter) not in names for group in groups for parameter in group):
            raise UsageError(
                f"an optimizer ({type(optimizer).__name__}) has parameters that are not those of the "
                f"{type(self.module).__name__}; make it of the module's parameters, and give Fabric both at "
                "once: fabric.setup(module, optimizer)"
            )
        # A shared weight that no stage here holds may be several placeholders.
        return [list(dict.fromkeys(names[id(one)] for one in group)) for group in groups]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The plain module's optimizer state on rank 0, an empty one on the others; every rank calls it."""
        with self.pipe.job.calling("save_checkpoint"):
            state = self.pipe.weights.optimizer_state_dict(optimizer, full=True)
        names = self.names_in(optimizer)
        place = {name: at for at, name in enumerate(name for group in names for name in group)}
        by_place = {
            place[self._first_names[name.removeprefix(_PREFIX)]]: of
            for name, of in state.get("state", {}).items()
        }
        groups = [
            {**group, "params": [place[name] for name in of]}
            for group, of in zip(state.get("param_groups", ()), names, strict=False)
        ]
        return {**state, "state": by_place, "param_groups": groups} if state else {}

    def load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load the plain module's optimizer state: each rank loads what it holds."""
        names = self.names_in(optimizer)
        paths = [_PREFIX + name for group in names for name in group]
        groups = [
            {**group, "params": [_PREFIX + name for name in of]}
            for group, of in zip(state["param_groups"], names, strict=True)
        ]
        named = {paths[place]: of for place, of in state["state"].items()}
        self.pipe.weights.load_optimizer_state_dict(
            optimizer, {"state": named, "param_groups": groups}
        )

    def clip(self, optimizer: Optimizer, max_norm: float, **options: Any) -> Tensor:
        """Clip the gradients by their norm over all ranks to at most ``max_norm``; return the norm before."""
        mine = [one for group in optimizer.param_groups for one in group["params"]]
        return clip_whole(self.pipe, mine, max_norm, **options)


# ---- both strategies


class _Cuts:
    """Makes the pipeline of a strategy; Lightning's strategy, the other base, provides the processes."""

    def __init__(
        self,
        ranks: int | None = None,
        *,
        save_distributed_checkpoint: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self._in_parts = save_distributed_checkpoint
        for name in options.keys() & _OURS:
            raise UsageError(
                f"{type(self).__name__} has no argument {name}=: the loss is what training_step returns, a "
                "mean, Lightning says which devices there are, and ranks= how many make one pipeline"
            )
        self._ranks, self._options = ranks, options
        self._module: _OnPipeline | None = None

    @property
    def pipelined(self) -> _OnPipeline:
        """The module on its pipeline.

        Raises:
            UsageError: there is no pipeline yet.
        """
        if self._module is None:
            raise UsageError("there is no pipeline yet; Trainer.fit and fabric.setup make it")
        return self._module

    @property
    def pipe(self) -> Pipeline:
        """The pipeline."""
        return self.pipelined.pipe

    def _layout(self) -> tuple[int, int]:
        """The number of pipelines side by side, and the number of processes in each."""
        processes: Any = self
        world: int = processes.num_nodes * processes.num_processes
        each = world if world == 1 or self._ranks is None else self._ranks
        return pipelines_in(world, each), each

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """How Lightning divides the data between pipelines; a single pipeline reads all of it."""
        processes: Any = self
        replicas, each = self._layout()
        number = processes.global_rank // each
        return {"num_replicas": replicas, "rank": number} if replicas > 1 else None

    def setup_environment(self) -> None:
        """Start the process group; one process that holds all ranks needs none."""
        strategy: Any = self
        if self._layout() == (1, 1):
            strategy.accelerator.setup_device(strategy.root_device)
            return
        limit = strategy._timeout
        with meeting_in_time(self._options.get("timeout"), limit) as strategy._timeout:
            super().setup_environment()  # type: ignore[misc] # of Lightning's strategy
        strategy._timeout = limit

    def _configure_launcher(self) -> None:
        # A launcher would change the number of threads of this process.
        if self._layout() != (1, 1):
            super()._configure_launcher()  # type: ignore[misc]

    # ---- checkpoints in which each process writes its part

    def _save_parts(
        self, path: Any, rest: dict[str, Any], step: int, optimizers: Mapping[str, Optimizer]
    ) -> None:
        """Save the weights, optimizers and random numbers, and beside them what Lightning keeps."""
        strategy: Any = self
        folder, name = Path(path), f"{_REST}-{uuid4().hex[:12]}.pt"

        def write() -> None:
            if strategy.is_global_zero:
                files: Any = strategy.checkpoint_io
                # What the checkpoint names is on the disk before it.
                if isinstance(files, AsyncCheckpointIO):
                    files = files.checkpoint_io
                files.save_checkpoint(rest, folder / name)
                with (folder / name).open("rb") as file:
                    os.fsync(file.fileno())

        with Checkpoints(folder, keep=1) as checkpoints:
            self.pipe.job.meet(write, doing="save")
            checkpoints.save(step, extra={_REST: name}, pipe=self.pipe, **optimizers)
            if strategy.is_global_zero:
                for file in {*folder.glob(f"{_REST}-*.pt")} - {folder / name}:
                    file.unlink(missing_ok=True)

    def _load_parts(
        self, path: Any, optimizers: Mapping[str, Optimizer], *, strict: bool, **options: Any
    ) -> dict[str, Any]:
        """Load what :meth:`_save_parts` saved; return what Lightning keeps, read with its options."""
        strategy: Any = self
        with Checkpoints(path) as checkpoints:
            states: dict[str, Any] = {**optimizers}
            step = checkpoints.load(strict=strict, pipe=self.pipe, **states)
            extra = checkpoints.extra if isinstance(checkpoints.extra, dict) else {}
            if step is None or _REST not in extra:
                raise UsageError(f"{path} is a folder without a checkpoint of Lightning's loop")
            name = file_name(str(extra[_REST]), rf"{_REST}-[0-9a-f]{{12}}\.pt", Path(path))
        rest: dict[str, Any] = strategy.checkpoint_io.load_checkpoint(Path(path, name), **options)
        return rest

    def _cut(self, module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> _OnPipeline:
        device: torch.device = self.root_device  # type: ignore[attr-defined]
        replicas, each = self._layout()
        options: dict[str, Any] = {"device": device, "ranks": self._ranks}
        if replicas > 1:
            options |= side_by_side(device, replicas * each, each)
        if self._module is not None:
            self._module.pipe.close()
        self._module = _OnPipeline(module, optimizers, **{**options, **self._options})
        return self._module


# ---- for the Trainer


class PipelineStrategy(_Cuts, TrainerProcesses):
    """Runs the steps of a ``LightningModule`` on a pipeline.

    ::

        strategy = PipelineStrategy(schedule="1F1B", ranks=2, microbatches=4)
        trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy)      # all ranks in one process
        trainer.fit(module, loader)

    With ``devices=2``, started by torchrun or by Lightning, each process is one rank. See
    docs/lightning.md.

    Args:
        ranks: the number of ranks in one pipeline, by default all processes. More processes than ranks form
            several pipelines side by side, each with its share of the data.
        save_distributed_checkpoint: whether a checkpoint is a folder into which each process writes its part,
            for any layout. Otherwise it is the plain Trainer's file, for which rank 0 collects everything.
        options: of :class:`penstock.Pipeline`: ``schedule``, ``microbatches``, ``stages`` and others; and
            ``loss_weight``, a function of the batch, and ``loss_check``, which are the ``weight`` and
            ``check`` of a :class:`penstock.Loss`. The step and Lightning set the loss, devices and groups.

    Raises:
        UsageError: an argument is one that the step or Lightning sets.
    """

    def setup(self, trainer: Trainer) -> None:
        """Cut the module, and make its optimizers."""
        module = self.lightning_module
        assert module is not None
        assert self.accelerator is not None
        if not module.automatic_optimization:
            raise UsageError(
                f"{type(module).__name__} has automatic_optimization=False; a pipeline runs forward and "
                "backward of a step together, so training_step cannot call manual_backward. Let Lightning "
                "optimize, or use Fabric, or write the loop with penstock.Pipeline"
            )
        if self._layer_sync is not None:
            raise UsageError(
                "sync_batchnorm=True: batch norms in a pipeline use a microbatch's statistics; leave it out"
            )
        _refuse_callbacks(trainer, several=self._layout() != (1, 1))
        self.accelerator.setup(trainer)
        if self._module is None or self._module.module is not module:
            self._cut(self.precision_plugin.convert_module(module))
        if self.distributed_sampler_kwargs is None:
            # Lightning would shuffle, as it does for replicas.
            trainer._accelerator_connector.use_distributed_sampler = False
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        # Lightning has no other hook for the norm of all gradients.
        vars(self.precision_plugin)["clip_grad_by_norm"] = self.pipelined.clip

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step``, forward and backward; the loss's backward then adds the gradients."""
        loss = self._run_step("train", "training_step", args, kwargs)
        trainer = self.lightning_module.trainer  # type: ignore[union-attr] # there is one in a step
        if self.pipe.stopping and not trainer.fit_loop._should_accumulate():
            # Read after the hooks of this batch: all ranks then raise SIGTERMException (Lightning 2.6).
            trainer._signal_connector.received_sigterm = True
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, ModelCheckpoint):
                    callback.save_on_exception = True
        return loss

    def on_train_start(self) -> None:
        """Leave signals to an open :class:`penstock.GracefulStop`.

        Lightning's handler of SIGTERM waits in a broadcast, to which ranks without the signal do not come.
        """
        super().on_train_start()
        GracefulStop.take_signals()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``validation_step``."""
        return self._run_step("val", "validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``test_step``."""
        return self._run_step("test", "test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``predict_step``; every rank gets its result for the whole batch."""
        return self._run_step("predict", "predict_step", args, kwargs)

    def _run_step(self, kind: str, step_name: str, args: Any, kwargs: Any) -> Any:
        with getattr(self.precision_plugin, f"{kind}_step_context")():
            return self.pipelined.run(step_name, args, kwargs)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Checkpoints are loaded after the cut: each rank loads what it holds."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The plain module's state dict on rank 0, if a checkpoint is one file; every rank calls it."""
        return {} if self._in_parts else self.pipelined.state()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of the plain module's optimizer on rank 0, likewise; every rank calls it."""
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return {} if self._in_parts else self.pipelined.optimizer_state(inner)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; every rank calls it."""
        if not self._in_parts:
            checkpoint["penstock"] = self.pipe.randomness.state_dict()
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        has_all = "optimizer_states" in checkpoint
        if has_all:
            checkpoint["optimizer_states"] = []
        optimizers = self._labelled() if has_all else {}
        self._save_parts(filepath, checkpoint, checkpoint["global_step"], optimizers)

    def _labelled(self) -> dict[str, Optimizer]:
        return {f"optimizer{number}": one for number, one in enumerate(self.optimizers)}

    # The options differ between versions of Lightning.
    def load_checkpoint(self, checkpoint_path: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Read a checkpoint; of one in parts, each rank loads its own at once."""
        if not Path(checkpoint_path).is_dir():
            return super().load_checkpoint(checkpoint_path, **options)
        module: Any = self.lightning_module
        fits = module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self._labelled() if fits else {}
        strict: bool = module.strict_loading
        return self._load_parts(checkpoint_path, optimizers, strict=strict, **options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the plain module's state dict from a file, and continue its random numbers."""
        if checkpoint["state_dict"]:
            self.pipelined.load(checkpoint["state_dict"], strict=strict)
        if "penstock" in checkpoint:
            self.pipe.randomness.load_state_dict(checkpoint["penstock"])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the plain module's optimizers from a file."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            self.pipelined.load_optimizer(optimizer, state)

    def teardown(self) -> None:
        """Tear down; the module stays cut for the next call of the Trainer."""
        # Lightning's own would move the module to the CPU, but other ranks' weights have no data.
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _refuse_callbacks(trainer: Trainer, *, several: bool) -> None:
    """Refuse callbacks that need whole weights, or make new ones after the cut."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined] # Lightning sets it later
        name = type(callback).__name__
        if isinstance(callback, ModelPruning):
            raise UsageError(
                f"{name} replaces weights by products with masks after the module is cut; prune the module "
                "before trainer.fit, by torch.nn.utils.prune"
            )
        if several and isinstance(callback, BaseFinetuning):
            raise UsageError(
                f"{name} compares the numbers of all weights, and in a process of several most of "
                "them lie on other ranks; set requires_grad in a hook, with an optimizer of all weights, or "
                "train in one process"
            )
        if several and isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise UsageError(
                f"{name} copies the module before it is cut, and in a process of several most of the weights "
                "lie on other ranks; average them in a hook, with a torch.optim.swa_utils.AveragedModel that "
                "is made in on_fit_start, or train in one process"
            )


# ---- for Fabric


class FabricPipelineStrategy(_Cuts, FabricProcesses):
    """Runs the steps of a module on a pipeline, in a loop that is written with ``Fabric``.

    ::

        strategy = FabricPipelineStrategy(schedule="1F1B", ranks=2, microbatches=4)
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
        fabric.launch()
        model, optimizer = fabric.setup(module, optimizer)
        for number, batch in enumerate(loader):
            fabric.backward(model.training_step(batch, number))
            optimizer.step()
            optimizer.zero_grad()

    A module that is not a ``LightningModule`` returns the loss from its ``forward``.

    Args:
        ranks: as for :class:`PipelineStrategy`.
        save_distributed_checkpoint: as for :class:`PipelineStrategy`.
        options: as for :class:`PipelineStrategy`.
    """

    def __init__(self, ranks: int | None = None, **options: Any) -> None:
        super().__init__(ranks, **options)
        self._backward_sync_control = None

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: each stage is moved after the cut."""

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override] # no DDP
        """Cut a module."""
        return self._cut(module)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Cut a module, and limit each process's optimizers to the parameters of its stages."""
        return self._cut(module, optimizers), optimizers, scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Check an optimizer, which must be made of the module's parameters after the cut."""
        self.pipelined.names_in(optimizer)
        return optimizer

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the norm over all ranks."""
        self.precision.unscale_gradients(optimizer)
        options = {"norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
        return self.pipelined.clip(optimizer, max_norm, **options)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write a checkpoint; every rank calls it."""
        if not self._in_parts:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        if filter:
            raise UsageError(
                f"fabric.save(filter=) needs {type(self).__name__}(save_distributed_checkpoint=False), with "
                "which rank 0 collects what is saved"
            )
        optimizers = {name: of for name, of in state.items() if isinstance(of, Optimizer)}
        others = {
            name: of for name, of in state.items() if not isinstance(of, Optimizer | nn.Module)
        }
        rest = self._convert_stateful_objects_in_state(others, filter={})
        self._save_parts(path, rest, 0, optimizers)

    # The options differ between versions of Lightning.
    def load_checkpoint(  # type: ignore[override]
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,
        **options: Any,
    ) -> dict[str, Any]:
        """Load a checkpoint into the objects of ``state``; return what remains."""
        objects = dict(state) if isinstance(state, Mapping) else {"": state} if state else {}
        optimizers = {name: of for name, of in objects.items() if isinstance(of, Optimizer)}
        in_parts = Path(path).is_dir()
        if in_parts:
            rest = self._load_parts(path, optimizers, strict=strict, **options)
        else:
            rest = self.checkpoint_io.load_checkpoint(path, **options)
            rest = {"": rest} if "" in objects else rest
        for name, of in objects.items():
            if in_parts and isinstance(of, Optimizer | nn.Module):
                continue
            if name not in rest:
                if strict:
                    raise KeyError(f"{path} holds no {name!r}; strict=False leaves it as it is")
                continue
            value = rest.pop(name)
            if isinstance(of, nn.Module):
                self.pipelined.load(value, strict=strict)
            elif isinstance(of, Optimizer):
                self.pipelined.load_optimizer(of, value)
            elif hasattr(of, "load_state_dict"):
                of.load_state_dict(value)
            else:
                state[name] = value
        return rest

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The plain module's state dict on rank 0; every rank calls it."""
        return self.pipelined.state()

    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Load the plain module's state dict: each rank loads what it holds."""
        self.pipelined.load(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of the plain module's optimizer on rank 0; every rank calls it."""
        return self.pipelined.optimizer_state(optimizer)
