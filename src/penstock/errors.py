"""Every error that Penstock raises, in one tree, by whose fault it is.

::

    PenstockError
    ├── UsageError (ValueError)          the call is wrong: an argument, a flag
    │   ├── ScheduleError                a schedule of the wrong shape or order, an unknown name
    │   ├── PartitionError               a model that cannot be cut as asked
    │   ├── StateDictError (RuntimeError) a state dict that is not this model's
    │   ├── MicrobatchError              a batch that cannot be split or merged as asked
    │   ├── UnknownArgumentError (TypeError) an argument of a name that is not known
    │   └── ConfigError                  unknown or contradictory settings
    ├── InputFileError (ValueError)      what a file holds is wrong: a text, a schedule, a config
    ├── SpecError (ValueError)           a value that crosses stages is not what was agreed
    ├── StageError (RuntimeError)        the user's code raised inside an action
    │   └── PlanError                    a module did not do what was planned; also a PartitionError
    ├── NonFiniteError (RuntimeError)    a number that is infinite or none, where that is an error
    ├── MessageError (RuntimeError)      a message was expected that nobody sends, or the reverse
    ├── CheckpointError (RuntimeError)   a checkpoint that could not be written
    │   └── StorageError (OSError)       a file system that fails, in reading or writing
    ├── AgreementError (RuntimeError)    ranks that must agree do not
    ├── PeerFailed (RuntimeError)        another rank failed, and this one stops because of it
    ├── PoisonedError (RuntimeError)     the Pipeline failed before and must be rebuilt
    └── InternalError (RuntimeError)     a bug in Penstock: please report it

Each is also the built-in class in brackets, so code that catches those keeps working.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

OK, USAGE, INPUT, FAILURE, TEMPORARY, NON_FINITE = 0, 2, 65, 70, 75, 76
INTERRUPTED, TERMINATED = 130, 143
"""The exit statuses of a process that ends with one of these errors, or because it was told to."""


class PenstockError(Exception):
    """The base of every error that Penstock raises.

    Attributes:
        rank: whose fault it is, where all ranks raise it because of one of them.
    """

    rank: int | None = None


class UsageError(PenstockError, ValueError):
    """The call is wrong. The message names the value, what was expected and the remedy."""


class ScheduleError(UsageError):
    """A schedule that cannot be built, has the wrong shape, or fails its validation."""


class PartitionError(UsageError):
    """A model that cannot be cut into stages as asked."""


class StateDictError(UsageError, RuntimeError):
    """A state dict that does not fit the model: what is missing, unexpected or of another shape."""


class MicrobatchError(UsageError):
    """A batch that cannot be split into microbatches, or outputs that cannot be merged."""


class UnknownArgumentError(UsageError, TypeError):
    """An argument by name that there is not; the message says which is near."""


class ConfigError(UsageError):
    """Settings that are unknown or contradict each other."""


class InputFileError(PenstockError, ValueError):
    """A file was read and what it holds cannot be used."""


class SpecError(PenstockError, ValueError):
    """A value that crosses stages differs from the agreed dtype, shape or structure."""


class StageError(PenstockError, RuntimeError):
    """The user's code raised inside an action; the cause is chained as ``__cause__``."""


class PlanError(PartitionError, StageError):
    """In a step, a module or the code between modules did something else than in the run without data.

    The plan of the step is dropped, and the next step is planned anew.
    """


class NonFiniteError(PenstockError, RuntimeError):
    """A loss or a norm is infinite or no number, where the user asked that this be an error."""


class MessageError(PenstockError, RuntimeError):
    """A program expects a message that nobody sends, or sends one that nobody expects."""


class CheckpointError(PenstockError, RuntimeError):
    """A checkpoint could not be written; those that were written before are as they were."""


class StorageError(CheckpointError, OSError):
    """A file system failed: the message names the path, the host and the error, which ``errno`` holds.

    What a file holds may be right: a file that is damaged is an :class:`InputFileError`.
    """


class AgreementError(PenstockError, RuntimeError):
    """Ranks that must run the same thing do not: the message lists which differ and in what."""


class PeerFailed(PenstockError, RuntimeError):
    """Another rank failed, died or makes no progress; the message names it, and what it was doing.

    Attributes:
        failures: all failures that are known, in the order in which they happened.
        status: the exit status that the first one means.
    """

    def __init__(self, message: str, failures: tuple[Any, ...] = (), status: int = 75) -> None:
        super().__init__(message)
        self.failures = failures
        self.status = status


class PoisonedError(PenstockError, RuntimeError):
    """An earlier step of this Pipeline failed; its state is unknown and it must be rebuilt."""


class InternalError(PenstockError, RuntimeError):
    """This should never happen. It is a bug in Penstock: please report it with the message."""


_STATUSES: tuple[tuple[type[BaseException], int], ...] = (
    (KeyboardInterrupt, INTERRUPTED),
    (NonFiniteError, NON_FINITE),
    (InputFileError, INPUT),
    (UsageError, USAGE),
)


def status_of(error: BaseException) -> int:
    """The exit status for an exception: from 1 to 255, and 0 only for a SystemExit that means success.

    The ``status`` of an error that is not Penstock's, as HTTP clients have one, says nothing of the process.
    """
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return code % 256 or (FAILURE if code else OK)
    if isinstance(error, PeerFailed):
        return error.status
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), FAILURE)


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type where there is none, or where it cannot be told."""
    try:
        return str(error).strip().splitlines()[0]
    except Exception:
        return type(error).__name__


def check_known(options: Iterable[str], known: Iterable[str], instead: Mapping[str, str]) -> None:
    """Check that arguments by name are known.

    Args:
        options: the names that were given.
        known: the names that there are.
        instead: for some other names, what to use.

    Raises:
        UnknownArgumentError: there is no such argument; the message says what to use, or what is near.
    """
    names = list(known)
    for name in options:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            listed = f"there are {', '.join(f'{of}=' for of in names)}"
            hint = instead.get(name) or (f"did you mean {near[0]}=?" if near else listed)
            raise UnknownArgumentError(f"there is no argument {name}=; {hint}")


def printable(text: str, keep: str = "\n\t") -> str:
    """A text with everything escaped that could steer a terminal, hide there, or not be written at all.

    Args:
        text: from somebody else, such as a file or another process.
        keep: what is left as it is nonetheless.
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def shortened(text: str, most: int = 120) -> str:
    """A name from a file, for a message: escaped, and not too long."""
    text = printable(text, "")
    return text if len(text) <= most else f"{text[: most - 3]}..."


def quoted(names: Iterable[str], most: int = 20) -> str:
    """Names for a message, in quotes."""
    return listed(names, most, '"')


def listed(names: Iterable[str], most: int = 20, quote: str = "") -> str:
    """Names for a message: escaped, not too long, and not too many."""
    every = list(names)
    shown = ", ".join(f"{quote}{shortened(name)}{quote}" for name in every[:most])
    return shown if len(every) <= most else f"{shown} and {len(every) - most} more"


def public_name(kind: type[PenstockError]) -> str:
    """The name of an error's class in the tree above: of one from elsewhere, that of its nearest base."""
    return next(base.__name__ for base in kind.__mro__ if base.__module__ == __name__)


def error_named(name: str) -> type[PenstockError]:
    """The class of a name in the tree above; :class:`PenstockError` where there is none of that name."""
    error = globals().get(name)
    return error if isinstance(error, type) and issubclass(error, PenstockError) else PenstockError
