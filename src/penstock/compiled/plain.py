"""A graph as a Python function: one line per operation, and nothing else."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

Function = Callable[[list[Any]], Any]
"""Takes a list of arguments, which it empties, so that each is free after its last use."""


def function_of(module: GraphModule, _: Any = None) -> Function:
    """Returns a function that runs a graph's operations in their order."""
    return _Writer(module).function()


class _Writer:
    def __init__(self, module: GraphModule) -> None:
        self._module = module
        self._known: dict[str, Any] = {}
        self._names: dict[Node, str] = {}

    def function(self) -> Function:
        nodes = list(self._module.graph.nodes)
        arguments = [node for node in nodes if node.op == "placeholder"]
        for place, node in enumerate(nodes):
            self._names[node] = f"v{place}"
        taken = "".join(f"{self._names[node]}, " for node in arguments)
        lines = [f"{taken}= args" if taken else "", "args.clear()"]
        lines += self._dropped(node for node in arguments if not node.users)
        last = {used: node for node in nodes for used in node.all_input_nodes}
        for node in nodes:
            if node.op != "placeholder":
                lines.append(self._line(node))
                over = [used for used in node.all_input_nodes if last[used] is node]
                lines += self._dropped(over if node.op != "output" else ())
                lines += self._dropped([node] if node.op != "output" and not node.users else ())
        source = "def run(args):\n" + "".join(f"    {line}\n" for line in lines if line)
        exec(compile(source, "<compiled stage>", "exec"), self._known)
        made: Function = self._known["run"]
        vars(made)["_boxed_call"] = True
        return made

    def _dropped(self, nodes: Any) -> list[str]:
        names = [self._names[node] for node in nodes]
        return [f"del {', '.join(names)}"] if names else []

    def _line(self, node: Node) -> str:
        if node.op == "output":
            return f"return {self._text(node.args[0])}"
        return f"{self._names[node]} = {self._call(node)}"

    def _call(self, node: Node) -> str:
        if node.op == "get_attr":
            return self._constant(operator.attrgetter(str(node.target))(self._module))
        if node.target is operator.getitem:
            return f"{self._text(node.args[0])}[{self._text(node.args[1])}]"
        # What the overload's own __call__ would do, but for the call.
        target = node.target._op if isinstance(node.target, OpOverload) else node.target
        arguments = [self._text(value) for value in node.args]
        arguments += [f"{name}={self._text(value)}" for name, value in node.kwargs.items()]
        return f"{self._constant(target)}({', '.join(arguments)})"

    def _text(self, value: Any) -> str:
        if isinstance(value, Node):
            return self._names[value]
        if isinstance(value, tuple):
            return f"({''.join(f'{self._text(each)}, ' for each in value)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k!r}: {self._text(v)}' for k, v in value.items())}}}"
        if isinstance(value, slice):
            parts = value.start, value.stop, value.step
            return f"slice({', '.join(map(self._text, parts))})"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._known)}"
        self._known[name] = value
        return name
