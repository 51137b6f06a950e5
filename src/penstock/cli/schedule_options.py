"""The options that the ``penstock schedule`` commands share, as groups that a command takes whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from penstock import schedule as ps
from penstock.errors import UsageError

RANKS = 4
SHAPE, COSTS, PASSES = "Shape of a named schedule", "Costs", "Passes"


@dataclass(frozen=True)
class Shape:
    """How large a named schedule is."""

    ranks: Annotated[
        int | None, typer.Option("--ranks", "-p", help=f"Default: {RANKS}.", rich_help_panel=SHAPE)
    ] = None
    microbatches: Annotated[
        int | None,
        typer.Option(
            "--microbatches", "-m", help="Default: twice the ranks.", rich_help_panel=SHAPE
        ),
    ] = None
    stages_per_rank: Annotated[
        int | None, typer.Option("--stages-per-rank", "-v", rich_help_panel=SHAPE)
    ] = None

    def build(self, name: str) -> ps.Schedule:
        """The schedule of this name."""
        ranks = RANKS if self.ranks is None else self.ranks
        microbatches = 2 * ranks if self.microbatches is None else self.microbatches
        return ps.build(
            name, ranks=ranks, microbatches=microbatches, stages_per_rank=self.stages_per_rank
        )

    def refuse(self, path: str) -> None:
        """Refuse sizes where a file has its own."""
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if given:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise UsageError(f"{flags} is only for a named schedule; {path} has its own size")


def matching_names(incomplete: str) -> list[str]:
    """The schedules whose name begins so, for the shell to complete."""
    return [name for name in ps.names() if name.startswith(incomplete)]


@dataclass(frozen=True)
class Source:
    """Where a schedule comes from."""

    source: Annotated[
        str,
        typer.Argument(
            help="Name of a schedule, or a .csv or .json file.", autocompletion=matching_names
        ),
    ]

    @property
    def is_file(self) -> bool:
        """Whether it is a file rather than a name."""
        return Path(self.source).suffix.lower() in (".csv", ".json")

    def read(self, shape: Shape) -> ps.Schedule:
        """The schedule."""
        if self.is_file:
            shape.refuse(self.source)
            return ps.load(self.source)
        return shape.build(self.source)


@dataclass(frozen=True)
class CostFlags:
    """What actions cost."""

    forward: Annotated[
        str,
        typer.Option(help="Time of F: a number, or one per stage: 1,2,1,2.", rich_help_panel=COSTS),
    ] = "1"
    input: Annotated[str, typer.Option(help="Time of I.", rich_help_panel=COSTS)] = "1"
    weight: Annotated[str, typer.Option(help="Time of W.", rich_help_panel=COSTS)] = "1"
    backward: Annotated[
        str | None, typer.Option(help="Time of B. Default: I + W.", rich_help_panel=COSTS)
    ] = None
    latency: Annotated[float, typer.Option(help="Time of a message.", rich_help_panel=COSTS)] = 0
    unit: Annotated[
        str, typer.Option(help="Unit of the times: s, ms or us.", rich_help_panel=COSTS)
    ] = ""

    def costs(self, share: int = 1) -> ps.Costs:
        """The costs that the flags say.

        Args:
            share: over how many stages single numbers, and the memory, are to be divided.
        """
        if self.unit not in ("", "s", "ms", "us"):
            raise UsageError(f"--unit={self.unit}: must be s, ms or us")
        return ps.Costs(
            forward=_cost("forward", self.forward, share),
            input=_cost("input", self.input, share),
            weight=_cost("weight", self.weight, share),
            backward=None if self.backward is None else _cost("backward", self.backward, share),
            latency=self.latency,
            activation=1 / share,
            stash=1 / share,
            unit=self.unit,
        )


def _cost(name: str, text: str, share: int) -> float | list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--{name}={text}: must be a number, or one per stage: 1,2,1,2") from None
    return numbers if len(numbers) > 1 else numbers[0] / share


@dataclass(frozen=True)
class PassFlags:
    """What to do to a schedule before it is written."""

    communication: Annotated[
        bool,
        typer.Option(
            "--communication", help="Add the SEND and RECV actions.", rich_help_panel=PASSES
        ),
    ] = False
    compute_only: Annotated[
        bool,
        typer.Option("--compute-only", help="Keep only F, I, W and B.", rich_help_panel=PASSES),
    ] = False
    merge_backward: Annotated[
        bool,
        typer.Option(
            "--merge-backward",
            help="Merge each I and the W after it into B.",
            rich_help_panel=PASSES,
        ),
    ] = False
    prefetch: Annotated[
        int | None,
        typer.Option(
            help="Gather parameters (UNSHARD) this many stages ahead.", rich_help_panel=PASSES
        ),
    ] = None
    reduce_gradients: Annotated[
        bool,
        typer.Option(
            "--reduce-gradients",
            help="Add REDUCE_GRAD after each stage's last gradient.",
            rich_help_panel=PASSES,
        ),
    ] = False
    delay_receives: Annotated[
        bool,
        typer.Option(
            "--delay-receives",
            help="Post each RECV just before it is needed.",
            rich_help_panel=PASSES,
        ),
    ] = False
    wait_sends: Annotated[
        bool,
        typer.Option(
            "--wait-sends/--no-wait-sends",
            help="Add or remove WAIT_SEND actions.",
            rich_help_panel=PASSES,
        ),
    ] = False

    def apply(self, schedule: ps.Schedule) -> ps.Schedule:
        """The schedule after the chosen passes."""
        bound = self.prefetch
        chosen: list[tuple[bool, ps.Pass]] = [
            (self.compute_only, ps.compute_only),
            (self.merge_backward, ps.merge_backward),
            (bound is not None, lambda s: ps.prefetch(s, unsharded=bound or 0)),
            (self.reduce_gradients, ps.reduce_gradients),
            (self.communication, ps.add_communication),
            (self.delay_receives, ps.delay_receives),
            (self.wait_sends, ps.add_wait_sends),
        ]
        return ps.compose(*(apply for wanted, apply in chosen if wanted))(schedule)


def grouped(run: Callable[..., object]) -> Callable[..., object]:
    """A command for typer from a function that takes groups of options: their fields become its options."""
    hints = get_type_hints(run, include_extras=True)
    hints.pop("return", None)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    own = inspect.signature(run).parameters

    def wrapper(**given: Any) -> object:
        built = {
            name: group(
                **{option: given.pop(option) for option in inspect.signature(group).parameters}
            )
            for name, group in groups.items()
        }
        return run(**built, **given)

    parameters = [p for group in groups.values() for p in _parameters(group)]
    parameters += [
        own[name].replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name in hints
        if name not in groups
    ]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # for typer
    wrapper.__doc__ = run.__doc__
    return wrapper


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        own.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, own in inspect.signature(group).parameters.items()
    ]
