"""A rewritten module: a graph of one node, the step, which runs by a plan."""

from __future__ import annotations

import copy
import inspect
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxckpt.errors import CaptureError
from fxckpt.plans.types import Plan
from fxckpt.rewriting.execution import DynamoRunner, GraphRunner, Halves, RecordingBackend, Runner
from fxckpt.rewriting.export_guards import Guards
from fxckpt.rewriting.graph_pickle import Packed, pack, unpack
from fxckpt.torch_private import (
    GRAPH_FIELDS,
    is_jit_traced,
    is_traced,
    is_transformed,
    not_compiled,
    with_code,
)
from fxckpt.utils.pytrees import flatten

OWN = frozenset((*GRAPH_FIELDS, "graph", "_step", "__class__", "__dict__"))
"""The attributes that a rewritten module and its source do not have in common."""


class Rewritten(fx.GraphModule):
    """A module whose backward follows a plan; :func:`fxckpt.rewrite` makes it.

    It and its source are two objects over one ``__dict__``: parameters, buffers, hooks, mode and every other attribute are the same, whichever
    of the two is read, written or called. What the source's class defines (``state_dict``, ``train``, methods of its own) it has as well, for that
    class is one of its bases. Its own are its graph and the step; they live in slots.

    Without gradients it runs the forward as it was written, and so it does where ``torch.compile`` or a tracer goes through it. A call of other
    shapes, dtypes or training mode is planned on its own, once.
    """

    __slots__ = (*sorted(GRAPH_FIELDS), "_step")

    def __init__(self, step: StepModule) -> None:
        self._step = step
        super().__init__({}, step_graph(step.source, step), type(step.source).__name__)
        self.__dict__ = step.source.__dict__
        # A graph module has a class of its own. It gets its bases here: as bases from the start, their __init__ and __init_subclass__ would run.
        type(self).__bases__ = (Rewritten, _class_of(step.source))

    @property
    def source(self) -> nn.Module:
        """What was rewritten, as it was."""
        return self._step.source

    @property
    def plans(self) -> tuple[Plan, ...]:
        """A plan a signature, in the order they were made."""
        return self._step.recorder.known

    @property
    def plan(self) -> Plan:
        """The latest plan. Raises :class:`CaptureError` if there is none yet."""
        if not self.plans:
            raise CaptureError(NOT_YET)
        return self.plans[-1]

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The forward of the latest plan: its last outputs are what is saved for the backward."""
        return self._halves.forward

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The backward of the latest plan: what runs again is named after what it repeats."""
        return self._halves.backward

    @property
    def _halves(self) -> Halves:
        made = self._step.recorder.made
        if not made:
            raise CaptureError(
                "the graphs of the plan are made at the first call: call the module once."
                if self.plans
                else NOT_YET
            )
        return made[-1]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in OWN:
                raise
        # The source's class may have changed since.
        return getattr(self.source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.source, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.source, name)

    def recompile(self) -> Any:
        """Make the code of the graph anew."""
        code = super().recompile()
        type(self).forward = _Forward(vars(type(self))["forward"])  # type: ignore[assignment,method-assign]
        return code

    def delete_all_unused_submodules(self) -> None:
        """Delete what the graph of the source does not use; the graph of the step names no submodule."""
        if isinstance(self.source, fx.GraphModule):
            self.source.delete_all_unused_submodules()

    def print_readable(self, print_output: bool = True, *args: Any, **kwargs: Any) -> str:
        """Return the code of the step and, once planned, of its forward and backward, with what is saved and what runs again by name."""
        parts = [super().print_readable(False, *args, **kwargs)]
        if self._step.recorder.made:
            halves = self._halves
            parts.append(_summary(halves.plan))
            parts += [
                half.print_readable(False, *args, **kwargs)
                for half in (halves.forward, halves.backward)
            ]
        text = "\n".join(parts)
        if print_output:
            print(text)
        return text

    def __deepcopy__(self, memo: dict[int, Any]) -> Rewritten:
        source = copy.deepcopy(self.source, memo)
        # Among the attributes may have been the module itself.
        made: Rewritten = memo.setdefault(
            id(self), Rewritten(StepModule(source, self._step.options, self.plans))
        )
        return made

    def __copy__(self) -> Rewritten:
        return Rewritten(StepModule(copy.copy(self.source), self._step.options, self.plans))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_unpickled, (pack(self.source), self._step.options, self.plans))


def _unpickled(
    source: nn.Module | Packed | Guards, options: tuple[Any, ...], known: Sequence[Plan]
) -> Rewritten:
    return Rewritten(StepModule(unpack(source), options, known))


def _class_of(source: nn.Module) -> type[nn.Module]:
    """Return the class whose methods a rewritten module takes over. That of a graph holds the graph's code, and nothing else."""
    return nn.Module if isinstance(source, fx.GraphModule) else type(source)


class _Forward:
    """The forward of a rewritten module, which a ``forward`` among the attributes that it shares with its source does not hide."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function: Any = function

    def __get__(self, module: nn.Module | None, kind: type) -> Any:
        return self.function if module is None else self.function.__get__(module, kind)

    def __set__(self, module: nn.Module, value: Any) -> None:
        raise AttributeError("the forward of a rewritten module is that of its graph")


# Dynamo compiles what it comes across, and looks the forward up to do so.
not_compiled(_Forward.__get__)

NOT_YET = (
    "nothing was planned yet: the shapes are not known. Give them, fxckpt.rewrite(gm, policy, example_inputs=(x,)), or call the module once "
    "with gradients enabled."
)

NO_KWARGS: Mapping[str, Any] = types.MappingProxyType({})


class StepModule:
    """What the one node of a rewritten module's graph calls."""

    def __init__(
        self, source: nn.Module, options: tuple[Any, ...], known: Sequence[Plan] = ()
    ) -> None:
        self.source = with_code(source)
        self.options = options
        self.recorder = RecordingBackend(known, *options)
        kind = GraphRunner if isinstance(source, fx.GraphModule) else DynamoRunner
        self.runner: Runner = kind(source, self.recorder)
        # The code of a graph calls a function by its name.
        self.__name__ = "step"

    def __call__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        more: Sequence[Any] = (),
        more_kwargs: Mapping[str, Any] = NO_KWARGS,
    ) -> Any:
        """Run the forward."""
        args, kwargs = (*args, *more), {**kwargs, **more_kwargs}
        # Who traces or transforms is to see the ops themselves.
        is_seen_through = (
            torch.compiler.is_compiling() or is_jit_traced() or is_traced() or is_transformed()
        )
        if is_seen_through or not torch.is_grad_enabled() or not self._needs_plan(args, kwargs):
            return self.source.forward(*args, **kwargs)
        return self.runner(args, kwargs)

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Plan for these arguments."""
        with torch.enable_grad():
            if self._needs_plan(args, kwargs):
                self.runner.prepare(args, kwargs)

    def _needs_plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether anything may need a gradient, and all of it is a tensor, not what stands for one in a trace."""
        leaves, _ = flatten((args, kwargs))
        if any(isinstance(leaf, fx.Proxy) for leaf in leaves):
            return False
        # A function may read parameters that nobody can list.
        return (
            isinstance(self.source, FunctionModule)
            or any(t.requires_grad for t in leaves if isinstance(t, Tensor))
            or any(p.requires_grad for p in self.source.parameters())
        )


class FunctionModule(nn.Module):
    """A function as a module; the module that a method belongs to is its child ``owner``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function
        owner = getattr(function, "__self__", None)
        if isinstance(owner, nn.Module):
            self.owner = owner


def step_graph(source: nn.Module, step: Callable[..., Any]) -> fx.Graph:
    """Return the graph of a module of the signature of ``source`` that calls ``step(args, kwargs, more_args, more_kwargs)``.

    What goes by name only may go by position too: the code of a graph knows no other way.
    """
    parameters = parameters_of(source.forward)
    if not _can_spell(parameters):
        parameters = parameters_of(lambda *args, **kwargs: None)
    graph = fx.Graph()
    stars: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    given = {
        p: graph.placeholder(stars.get(p.kind, "") + p.name, default_value=p.default)
        for p in parameters
    }

    def of_kind(*kinds: Any) -> list[tuple[str, fx.Node]]:
        return [(p.name, node) for p, node in given.items() if p.kind in kinds]

    plain = of_kind(inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    args = tuple(node for _, node in plain)
    kwargs = dict(of_kind(inspect.Parameter.KEYWORD_ONLY))
    more: Any = next((node for _, node in of_kind(inspect.Parameter.VAR_POSITIONAL)), ())
    more_kwargs: Any = next((node for _, node in of_kind(inspect.Parameter.VAR_KEYWORD)), {})
    graph.output(graph.call_function(step, (args, kwargs, more, more_kwargs)))
    return graph


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return what a function takes: anything, if it does not tell, as functions in C do not."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return list(inspect.signature(lambda *args, **kwargs: None).parameters.values())


def _can_spell(parameters: Sequence[inspect.Parameter]) -> bool:
    """Return whether a graph's code can have these parameters: plain defaults, and none after which one without follows."""
    has_default = False
    for p in parameters:
        if p.default is not p.empty and not _is_plain(p.default):
            return False
        is_star = p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if has_default and p.default is p.empty and not is_star:
            return False
        has_default = has_default or p.default is not p.empty
    return True


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def _summary(plan: Plan) -> str:
    counts = Counter(run.name for run in plan.schedule)
    runs = ", ".join(
        name if counts[name] == 1 else f"{name} x {counts[name]}" for name in plan.recomputed
    )
    return f"# saved for the backward: {', '.join(plan.saved) or 'nothing'}\n# runs again in the backward: {runs or 'nothing'}\n"
