"""Rewritten modules: a graph with one node, the step, which follows a plan."""

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
from fxckpt.rewriting.graph_pickle import Packed, pack_module, unpack_module
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
"""The attributes that a rewritten module does not share with its source."""


class Rewritten(fx.GraphModule):
    """A module whose backward follows a plan, made by :func:`fxckpt.rewrite`.

    It shares one ``__dict__`` with its source: parameters, buffers, hooks, mode and every other
    attribute are the same, whichever of the two is read, written or called. The source's class is
    one of its bases, so that it has its methods (``state_dict``, ``train``, others). Only its graph
    and its step are its own; they are kept in slots.

    Without gradients, and under ``torch.compile`` or a tracer, it runs the original forward. Each
    signature of calls (shapes, dtypes, training mode, ...) is planned once.
    """

    __slots__ = (*sorted(GRAPH_FIELDS), "_step")

    def __init__(self, step: StepModule) -> None:
        self._step = step
        super().__init__({}, step_graph(step.source, step), type(step.source).__name__)
        self.__dict__ = step.source.__dict__
        # Each graph module has a class of its own, whose bases are set here: bases set from the
        # start would run their __init__ and __init_subclass__.
        type(self).__bases__ = (Rewritten, _class_of(step.source))

    @property
    def source(self) -> nn.Module:
        """The original module."""
        return self._step.source

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans, one per signature, in the order they were made."""
        return self._step.recorder.known

    @property
    def plan(self) -> Plan:
        """The latest plan; raises :class:`CaptureError` before the first."""
        if not self.plans:
            raise CaptureError(NOT_YET)
        return self.plans[-1]

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The latest plan's forward, whose last outputs are the values saved for the backward."""
        return self._halves.forward

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The latest plan's backward, whose recomputed nodes are named after their originals."""
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
        # The source's class may have been replaced since.
        return getattr(self.source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.source, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.source, name)

    def recompile(self) -> Any:
        """Regenerate the code of the graph."""
        code = super().recompile()
        forward = _Forward(vars(type(self))["forward"])
        type(self).forward = forward  # type: ignore[assignment,method-assign]
        return code

    def delete_all_unused_submodules(self) -> None:
        """Delete the submodules that the source's graph does not use.

        The graph of the step itself names no submodule.
        """
        if isinstance(self.source, fx.GraphModule):
            self.source.delete_all_unused_submodules()

    def print_readable(self, print_output: bool = True, *args: Any, **kwargs: Any) -> str:
        """Return the code of the step and, once planned, of its forward and backward.

        A summary between them names the saved and the recomputed values.
        """
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
        # The attributes may include the module itself, which is then copied already.
        made: Rewritten = memo.setdefault(
            id(self), Rewritten(StepModule(source, self._step.options, self.plans))
        )
        return made

    def __copy__(self) -> Rewritten:
        return Rewritten(StepModule(copy.copy(self.source), self._step.options, self.plans))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_unpickled, (pack_module(self.source), self._step.options, self.plans))


def _unpickled(
    source: nn.Module | Packed | Guards, options: Mapping[str, Any], known: Sequence[Plan]
) -> Rewritten:
    return Rewritten(StepModule(unpack_module(source), options, known))


def _class_of(source: nn.Module) -> type[nn.Module]:
    """Return the class whose methods a rewritten module inherits."""
    # The class of a graph holds only the graph's code.
    return nn.Module if isinstance(source, fx.GraphModule) else type(source)


class _Forward:
    """Data descriptor for the forward of a rewritten module.

    A ``forward`` among the attributes shared with the source cannot hide it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function: Any = function

    def __get__(self, module: nn.Module | None, kind: type) -> Any:
        return self.function if module is None else self.function.__get__(module, kind)

    def __set__(self, module: nn.Module, value: Any) -> None:
        raise AttributeError("the forward of a rewritten module is that of its graph")


# Dynamo would compile the descriptor when it looks up the forward.
not_compiled(_Forward.__get__)

NOT_YET = (
    "nothing was planned yet: the shapes are not known. Give them, "
    "fxckpt.rewrite(gm, policy, example_inputs=(x,)), or call the module once "
    "with gradients enabled."
)

NO_KWARGS: Mapping[str, Any] = types.MappingProxyType({})


class StepModule:
    """The step of a rewritten module, called by the one node of its graph."""

    def __init__(
        self, source: nn.Module, options: Mapping[str, Any], known: Sequence[Plan] = ()
    ) -> None:
        self.source = with_code(source)
        self.options = options
        self.recorder = RecordingBackend(known, **options)
        kind = GraphRunner if isinstance(source, fx.GraphModule) else DynamoRunner
        self.runner: Runner = kind(source, self.recorder)
        # The generated code calls the function by its name.
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
        # Tracers and function transforms must see the ops themselves.
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
        """Return whether anything may need a gradient and no argument is a tracer's proxy."""
        leaves, _ = flatten((args, kwargs))
        if any(isinstance(leaf, fx.Proxy) for leaf in leaves):
            return False
        # A function may read parameters that cannot be listed.
        return (
            isinstance(self.source, FunctionModule)
            or any(t.requires_grad for t in leaves if isinstance(t, Tensor))
            or any(p.requires_grad for p in self.source.parameters())
        )


class FunctionModule(nn.Module):
    """A function as a module; the module of a bound method is its child ``owner``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function
        owner = getattr(function, "__self__", None)
        if isinstance(owner, nn.Module):
            self.owner = owner


def step_graph(source: nn.Module, step: Callable[..., Any]) -> fx.Graph:
    """Return a graph that calls ``step(args, kwargs, more_args, more_kwargs)``.

    It has the signature of ``source``, except that keyword-only parameters may also be given by
    position, since the code of a graph cannot express them.
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
    """Return the parameters of a function, or ``*args, **kwargs`` if it has no signature."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return list(inspect.signature(lambda *args, **kwargs: None).parameters.values())


def _can_spell(parameters: Sequence[inspect.Parameter]) -> bool:
    """Return whether a graph's code can express these parameters.

    Defaults must be plain values, and no parameter without one may follow one with one.
    """
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
    """Return comment lines that name the saved and the recomputed values of a plan."""
    counts = Counter(run.name for run in plan.schedule)
    runs = ", ".join(
        name if counts[name] == 1 else f"{name} x {counts[name]}" for name in plan.recomputed
    )
    return (
        f"# saved for the backward: {', '.join(plan.saved) or 'nothing'}\n"
        f"# recomputed in the backward: {runs or 'nothing'}\n"
    )
