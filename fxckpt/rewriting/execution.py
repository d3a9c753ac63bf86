"""Execution of rewritten modules, with one plan per call signature.

:class:`GraphRunner` interprets a given graph, so that the modules, names and source lines of its
nodes reach the policy. :class:`DynamoRunner` compiles any other module or function with Dynamo,
whose guards notice when its Python would behave differently. Both pass the joint graph to the
partitioner of :class:`fxckpt.Backend`.
"""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxckpt.backend import Backend
from fxckpt.errors import CaptureError, FxckptError
from fxckpt.partitioner import OPTIONS as PLANNING_OPTIONS
from fxckpt.partitioner import Partitioner
from fxckpt.planner.capture import capture_joint
from fxckpt.plans.types import Plan
from fxckpt.rewriting.call_signature import Signature, signature_of
from fxckpt.rewriting.interpreter import Interpreted
from fxckpt.torch_private import (
    FakeTensorMode,
    capture_whole,
    compile_whole,
    errors_told_once,
    inline_regions,
    tracing_lock,
)
from fxckpt.utils.pytrees import flatten, unflatten


@dataclass(frozen=True, eq=False)
class Halves:
    """A plan and the forward and backward graphs that follow it."""

    plan: Plan
    forward: fx.GraphModule
    backward: fx.GraphModule


class RecordingPartitioner(Partitioner):
    """A partitioner that keeps the graphs it emits and applies the plans it knows."""

    def __init__(self, options: Partitioner, known: Sequence[Plan]) -> None:
        given: dict[str, Any] = dict(zip(PLANNING_OPTIONS, options.options, strict=True))
        super().__init__(**given)
        self.planner = replace(self.planner, in_place=options.planner.in_place)
        if not self.planner.is_fixed:
            self.planner = replace(self.planner, known=tuple(known))
        self.made: list[Halves] = []

    def partition(
        self,
        joint: fx.GraphModule,
        joint_inputs: Sequence[Any],
        *,
        num_fwd_outputs: int,
        **given: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and backward half of a joint graph, and keep copies of both."""
        forward, backward = super().partition(
            joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **given
        )
        plan = self.plans[-1]
        # The inner compiler rewrites the graphs it is given.
        halves = [
            fx.GraphModule(half, copy.deepcopy(half.graph), name)
            for half, name in ((forward, "Forward"), (backward, "Backward"))
        ]
        self.made = [*(known for known in self.made if known.plan != plan), Halves(plan, *halves)]
        if plan not in self.planner.known:
            self.planner = replace(self.planner, known=(*self.planner.known, plan))
        return forward, backward

    def _fall_back(self, *given: Any) -> NoReturn:
        """Raise the planning error: rewriting has no default partitioner to fall back on."""
        failed = next(error for error in given if isinstance(error, FxckptError))
        raise failed from failed.__cause__


class RecordingBackend(Backend):
    """A :class:`~fxckpt.Backend` that keeps the graphs it emits and applies the plans it knows."""

    partitioner: RecordingPartitioner

    def __init__(self, known: Sequence[Plan], **options: Any) -> None:
        super().__init__(**options, scope="graph")  # A module is one graph.
        self.partitioner = RecordingPartitioner(self.partitioner, known)

    @property
    def made(self) -> list[Halves]:
        """The latest graphs of each plan."""
        return self.partitioner.made

    @property
    def known(self) -> tuple[Plan, ...]:
        """The plans given and made, in this order."""
        return self.partitioner.planner.known

    def capture(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Plan ``function(*args, **kwargs)`` on fake tensors."""
        if self.inner == "inductor":
            # Inductor plans the graph that its own passes leave.
            capture_whole(function, tuple(args), dict(kwargs), self)
            return
        joint = capture_joint(function, args, dict(kwargs))
        self.partitioner.partition(joint.module, (), num_fwd_outputs=joint.num_fwd_outputs)


class Runner(ABC):
    """Base of the two ways to run the step of one module."""

    def __init__(self, source: nn.Module, recorder: RecordingBackend) -> None:
        self.source = source
        self.recorder = recorder

    @abstractmethod
    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Plan for these inputs without running anything."""

    @abstractmethod
    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the forward; its backward follows the plan."""


class DynamoRunner(Runner):
    """Runner that compiles a module with Dynamo, without graph breaks."""

    def __init__(self, source: nn.Module, recorder: RecordingBackend) -> None:
        super().__init__(source, recorder)
        self._forward: Callable[..., Any] | None = None
        self._compiled: Callable[..., Any] = source.forward

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Capture on fake tensors and plan."""
        # The module's own hooks run around the step.
        self.recorder.capture(self.source.forward, args, kwargs)

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the compiled forward; compile it on the first call."""
        if self._forward != self.source.forward:
            forward = self.source.forward
            self._compiled = compile_whole(forward, self.recorder)
            self._forward = forward
        return self._compiled(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class _Compiled:
    """The compiled graph of one signature."""

    run: Callable[..., Any]
    rebuild: Callable[[Sequence[Tensor]], Any]


class GraphRunner(Runner):
    """Runner that traces a graph by interpretation, once per signature.

    Parameters and buffers are inputs of the trace, which replaces them for its duration. A lock
    keeps other threads from reading them meanwhile.
    """

    def __init__(self, source: nn.Module, recorder: RecordingBackend) -> None:
        super().__init__(source, recorder)
        self._compiled: dict[Signature, _Compiled] = {}

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Trace on fake tensors and plan."""
        with tracing_lock():
            self._find(args, kwargs)

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the graph compiled for this signature; compile it on the first call."""
        with tracing_lock():
            compiled, tensors = self._find(args, kwargs)
        return compiled.rebuild(compiled.run(*tensors))

    def _find(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[_Compiled, list[Tensor]]:
        leaves, spec = flatten((tuple(args), dict(kwargs)))
        state = state_of(self.source)
        tensors = [*state.values(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        signature = signature_of(repr(spec), leaves, state.values(), self.source)
        found = self._compiled.get(signature)
        if found is None:
            found = self._compiled[signature] = self._compile(list(state), leaves, spec, tensors)
            # Tracing ran the modules' Python, which may have changed their attributes and so the
            # signature; later calls do not run it.
            self._compiled[signature_of(repr(spec), leaves, state.values(), self.source)] = found
        return found, tensors

    def _compile(
        self,
        names: Sequence[str],
        leaves: Sequence[Any],
        spec: pytree.TreeSpec,
        tensors: Sequence[Tensor],
    ) -> _Compiled:
        assert isinstance(self.source, fx.GraphModule)
        refuse_flat_weights(self.source)
        call = _FlatCall(with_inlined_regions(self.source), tuple(names), tuple(leaves), spec)
        with torch.enable_grad():
            return _Compiled(self.recorder(_graph_of(call, tensors), list(tensors)), call.rebuild)


class _FlatCall:
    """A graph as a function of tensors: its state, then the tensors among its arguments."""

    def __init__(
        self,
        graph: fx.GraphModule,
        names: tuple[str, ...],
        leaves: tuple[Any, ...],
        spec: pytree.TreeSpec,
    ) -> None:
        self.interpreted = Interpreted(graph)
        self.__name__ = "step"
        self.names = names
        # Keep no tensor alive.
        self.leaves = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        self.is_tensor = tuple(isinstance(leaf, Tensor) for leaf in leaves)
        self.spec = spec
        self.results: tuple[list[Any], pytree.TreeSpec] | None = None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        state = {f"graph.{name}": next(given) for name in self.names}
        args, kwargs = unflatten(
            [
                next(given) if is_tensor else leaf
                for leaf, is_tensor in zip(self.leaves, self.is_tensor, strict=True)
            ],
            self.spec,
        )
        try:
            result = torch.func.functional_call(self.interpreted, state, args, kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            shapes = ", ".join(
                f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
                for t in tensors[len(self.names) :]
            )
            raise CaptureError(
                f"the module does not run on these inputs ({shapes}): {error}"
            ) from error
        leaves, spec = flatten(result)
        self.results = ([None if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        self.is_result = [isinstance(leaf, Tensor) for leaf in leaves]
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Return the graph's result from its tensors."""
        assert self.results is not None, "the graph was not traced"
        constants, spec = self.results
        given = iter(tensors)
        return unflatten(
            [
                next(given) if is_tensor else leaf
                for leaf, is_tensor in zip(constants, self.is_result, strict=True)
            ],
            spec,
        )


def refuse_flat_weights(source: nn.Module) -> None:
    """Raise :class:`CaptureError` for RNNs, which compute with a flat copy of their weights."""
    for path, module in source.named_modules():
        if isinstance(module, nn.RNNBase):
            raise CaptureError(
                f"module {path!r} is an {type(module).__name__}: it computes with one flat copy of "
                "its weights, which no trace can follow. "
                "Rewrite the modules around it, or put fxckpt.checkpoint around it."
            )


def with_inlined_regions(source: fx.GraphModule) -> fx.GraphModule:
    """Return a graph with its ``nested_compile_region`` calls inlined; itself if it has none."""
    if not any("invoke_subgraph" in str(node.target) for node in source.graph.nodes):
        return source
    return inline_regions(fx.GraphModule(source, copy.deepcopy(source.graph)))


def _graph_of(call: _FlatCall, tensors: Sequence[Tensor]) -> fx.GraphModule:
    """Return the graph of one call, whose number of results is found on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), errors_told_once():
        results = len(call(*map(mode.from_tensor, tensors)))
    graph = fx.Graph()
    made = graph.call_function(
        call, tuple(graph.placeholder(f"input_{i}") for i in range(len(tensors)))
    )
    graph.output(tuple(graph.call_function(operator.getitem, (made, i)) for i in range(results)))
    return fx.GraphModule(nn.Module(), graph)


def state_of(source: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, buffers and other tensors read by a module's graph, by name.

    Shared tensors appear once. Names are sorted, so that a copy built in another order has the same
    plan.
    """
    state: dict[str, Tensor] = dict(source.named_parameters())
    state |= dict(source.named_buffers())
    if isinstance(source, fx.GraphModule):
        for node in source.graph.find_nodes(op="get_attr"):
            value = _attribute(source, node.target)
            if (
                isinstance(value, Tensor)
                and node.target not in state
                and not any(value is t for t in state.values())
            ):
                state[str(node.target)] = value
    return dict(sorted(state.items()))


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value
