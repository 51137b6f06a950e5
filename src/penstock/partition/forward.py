"""The author's forward, which runs on placeholders to write the scores of microbatches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock._engine.rng import Draws, generators_kept
from penstock._engine.values import map_tensors, tensors_in
from penstock.errors import PartitionError
from penstock.partition.alike import Memo
from penstock.partition.interception import (
    Interceptor,
    Run,
    attributes_told,
    intercepted,
    others_seen,
)
from penstock.partition.names import FakeTensor
from penstock.partition.score import Line, Score
from penstock.partition.snapshot import Snapshot, replaced
from penstock.partition.templates import look_of
from penstock.partition.tree import ScoreTree
from penstock.partition.writer import Writer

_HELD_BY_LINE = 3
"""The references to a placeholder that nothing but its line has, and what counts them."""


class Forward(ScoreTree):
    """An author's forward, and the lines that are known of it.

    Args:
        model: the whole model.
        forward: its forward.
        units: the paths of the modules that are placed as a whole.
        memo: what units gave, so that those that are alike need not run.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], units: Sequence[str], memo: Memo
    ) -> None:
        super().__init__(model, units, memo)
        self.forward = forward
        self._open_interceptors: list[Interceptor] = []
        self._open: dict[str, nn.Module] = {}

    def write(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        draws: Draws | None = None,
        interceptors: Sequence[Interceptor] = (),
        inner: Sequence[Interceptor] = (),
    ) -> Score:
        """Run the author's forward on placeholders, and write down what happens.

        Args:
            args: the model's arguments, with their numbers.
            kwargs: its keyword arguments.
            draws: seeds what functions between units draw; None leaves the generators alone.
            interceptors: the interceptors of other modules to place as a whole, such as those with hooks.
            inner: the interceptors of modules inside units, whose operations are counted too.

        Raises:
            PartitionError: the model cannot be cut this way; the message names the module and the line.
        """
        tensors = tensors_in((args, kwargs))
        if any(tensor.is_inference() for tensor in tensors):
            args, kwargs = map_tensors((args, kwargs), _for_autograd)
        batch = [tensor for tensor in tensors if tensor.requires_grad]
        writer = Writer(self, draws, batch)
        output = self.run(writer, args, kwargs, interceptors, inner)
        call = (args, kwargs) if writer.decides else None
        score = Score(*writer.ended(output), writer.root, batch, draws, writer.inner_work, call)
        writer.let_go()
        del writer, output
        for note in score.notes:
            for shown in note.line.shown.values():
                if sys.getrefcount(shown) > _HELD_BY_LINE:
                    del shown
                    self._replace_leaked(note.line)
                    break
        return score

    def _replace_leaked(self, line: Line) -> None:
        """Give a line other placeholders in place of those that the author's code has kept somewhere.

        In a later microbatch, or outside of the model, they stand for nothing, and using them is refused.
        """
        for number in list(line.shown):
            tensor = line.shown[number]
            if (
                type(tensor) is FakeTensor
                and tensor.layout is torch.strided
                and sys.getrefcount(tensor) > _HELD_BY_LINE
            ):
                line.first.setdefault(number, tensor)  # its memory says what shares it
                blank = self.blank((*look_of(tensor)[:4], line.looks[number][4]))
                line.marks = {k: n for k, n in line.marks.items() if n != number}
                line.marks[id(blank)] = number
                line.shown[number] = blank

    def rehearse(
        self,
        call: tuple[Sequence[Any], Mapping[str, Any]],
        interceptors: Sequence[Interceptor] = (),
        inner: Sequence[Interceptor] = (),
    ) -> Score:
        """Write a score of a call that does not count; whatever the author's code changes is put back.

        Args:
            call: the model's arguments; ones stand for tensors without data.
            interceptors: as for :meth:`write`.
            inner: as for :meth:`write`.
        """
        self.refresh()
        args, kwargs = map_tensors((tuple(call[0]), dict(call[1])), self._with_data)
        tables: list[Any] = [t for _, m in self.outside for t in (m._buffers, vars(m))]
        held = [(t, n, x) for t in tables for n, x in t.items() if type(x) is Tensor]
        copies = [(table, name, self._with_data(x)) for table, name, x in held]
        buffers, kept = self.buffers, Snapshot(self.modules, code=True, data=False)
        # A change of a copy is one of the buffer.
        named = zip(copies, held, strict=True)
        self.buffers = {id(y): buffers[id(x)] for (_, _, y), (_, _, x) in named if id(x) in buffers}
        try:
            with generators_kept([self.device]), replaced(copies):
                return self.write(args, kwargs, None, interceptors, inner)
        finally:
            self.buffers = buffers
            kept.restore()

    def _with_data(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor, of ones where it has no data."""
        if not tensor.is_meta:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        ones = torch.ones(tensor.shape, dtype=tensor.dtype, device=self.device)
        return ones.requires_grad_(tensor.requires_grad)

    @contextmanager
    def open(self, interceptors: Sequence[Interceptor] = ()) -> Iterator[None]:
        """A context in which calls of units are answered, for several microbatches.

        Args:
            interceptors: the interceptors of other modules to place as a whole, such as those with hooks.
        """
        self._settings = self._settings_now()
        self._open_interceptors = [*self.interceptors, *interceptors]
        self._open = {
            interceptor.path: interceptor.module for interceptor in self._open_interceptors
        }
        for path, module in self._open.items():
            self.note_held(path, module)
        padded = [
            module.register_forward_pre_hook(self._check_padding, with_kwargs=True)
            for _, module in self.outside
            if isinstance(module, nn.TransformerEncoder)
            and getattr(module, "use_nested_tensor", False)
            and not (module.training or torch.is_grad_enabled())
        ]
        try:
            with intercepted(self._open_interceptors, _unanswered, self._open), attributes_told():
                yield
        finally:
            self._open_interceptors, self._open, self._settings = [], {}, ()
            for hook in padded:
                hook.remove()

    def _check_padding(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Refuse PyTorch's encoders that drop padding with nested tensors, if their layers are units."""
        if kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None) is not None:
            raise PartitionError(
                f"{self.paths.get(id(module)) or 'the model'} (TransformerEncoder) drops padded positions in "
                "evaluation, by nested tensors, which cannot travel between stages; set its "
                "use_nested_tensor = False, or place it as a whole by naming it in stages="
            )

    def run(
        self,
        writer: Writer,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        interceptors: Sequence[Interceptor] = (),
        inner: Sequence[Interceptor] = (),
    ) -> Any:
        """Run the author's forward, of which a writer answers the calls."""
        with ExitStack() as stack:
            if not self._open:
                stack.enter_context(self.open(interceptors))
            writer.units = self._open
            for interceptor in self._open_interceptors:
                interceptor.call = writer.unit
            stack.enter_context(writer.settled())
            if inner:
                stack.enter_context(intercepted(inner, writer.counted))
            stack.enter_context(others_seen(writer))
            stack.enter_context(writer)
            try:
                output: Any = self.forward(*args, **kwargs)
            except Exception as error:
                if writer.refused:
                    raise writer.refused[0] from None
                raise writer.explained(error) from error
            for interceptor in self._open_interceptors:
                interceptor.call = _unanswered
        if writer.refused:
            raise writer.refused[0]
        return output


def _unanswered(interceptor: Interceptor, run: Run, args: Any, kwargs: Any) -> Any:
    """The module's own call, between microbatches."""
    return run(*args, **kwargs)


def _for_autograd(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor
