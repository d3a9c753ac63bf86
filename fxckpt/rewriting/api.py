"""Entry point :func:`rewrite`: a graph, module or function in, a module that follows a plan out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils import _pytree as pytree

from fxckpt.budgets import Budget, within
from fxckpt.costs.models import CostModel
from fxckpt.errors import InvalidOption
from fxckpt.rewriting.example_inputs import inputs_of, real_like
from fxckpt.rewriting.joint import is_joint, rewrite_joint
from fxckpt.rewriting.module import FunctionModule, Rewritten, StepModule, parameters_of
from fxckpt.tiers import Tier, tier_of
from fxckpt.torch_private import FakeTensor


def rewrite(
    gm: fx.GraphModule | nn.Module | Callable[..., Any],
    policy: Any = None,
    *,
    example_inputs: Any = None,
    budget: Budget = None,
    cost: str | CostModel = "roofline",
    inner: Any = "aot_eager",
    max_slowdown: float | None = None,
    offload: Tier | str | None = None,
) -> fx.GraphModule:
    """Return ``gm`` as a module whose backward follows a plan of saved and recomputed values.

    Parameters
    ----------
    gm:
        A forward graph from ``torch.fx.symbolic_trace``, ``make_fx``, ``torch.export``
        (``.module()``) or Dynamo; any module, method or function, which Dynamo captures; or a joint
        graph in AOTAutograd's form (placeholders ``primals_*`` and ``tangents_*``), for which the
        joint graph with explicit recompute is returned. Its graph is not changed.
    policy:
        As for :class:`fxckpt.Backend`. A :class:`~fxckpt.Plan` is applied unchanged and refused for
        any other graph.
    example_inputs:
        The arguments to plan for: a tuple (positional), a dict (by name), or one tensor. By default
        shapes come from the graph's metadata (``meta["val"]``) or, without any, from the first
        call.
    budget, cost, inner, max_slowdown, offload:
        As for :class:`fxckpt.Backend`.

    Returns
    -------
    A ``GraphModule`` with the signature, parameters, buffers and ``state_dict`` keys of ``gm``. It
    shares everything with ``gm`` but the graph: state, hooks, mode and attributes are the same
    objects, and it has the methods of the class of ``gm``. Only a parametrization of ``gm`` itself
    must be registered on ``gm``. The module of a bound method is the child ``owner``.

    ``.plan`` is the latest plan; ``.forward_graph`` and ``.backward_graph`` are the graphs that
    follow it. Each signature (shapes, strides, dtypes, devices, which tensors require gradients,
    values of other arguments, training mode, autocast) gets a plan of its own at its first call,
    and keeps it. Sizes are never symbolic: pad varying ones to a few sizes, or compile with
    :class:`fxckpt.Backend`, which plans for ranges.

    Raises
    ------
    InvalidOption, InvalidBudget
        For invalid arguments.
    BudgetInfeasible, PolicyConflict, PolicyMatchesNothing, PlanMismatch, CaptureError
        From planning: at once if the shapes are known, otherwise at the first call.

    Examples
    --------
    >>> import torch, fxckpt
    >>> from fxckpt.policies import save_matmuls
    >>> from torch import nn
    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)))
    >>> graph = torch.fx.symbolic_trace(model)
    >>> gm = fxckpt.rewrite(graph, save_matmuls, example_inputs=(torch.randn(4, 8),))
    >>> gm.plan.saved, gm.plan.recomputed
    (('addmm', 'addmm_1'), ('gelu',))
    >>> gm(torch.randn(4, 8)).sum().backward()
    """
    budget = within(budget, max_slowdown)
    tier = tier_of(offload)
    options = {
        "budget": budget,
        "policy": policy,
        "inner": inner,
        "cost": cost,
        "offload": tier,
    }
    if isinstance(gm, Rewritten):
        if policy is None and budget is None:
            return gm
        gm = gm.source
    if isinstance(gm, fx.GraphModule) and is_joint(gm.graph):
        return rewrite_joint(gm, policy, budget=budget, cost=cost, offload=tier)
    source = _source_of(gm)
    step = StepModule(source, options)
    rewritten = Rewritten(step)
    given = inputs_of(source) if example_inputs is None else _arguments(source, example_inputs)
    if given is not None:
        step.prepare(*given)
    return rewritten


def _source_of(gm: nn.Module | Callable[..., Any]) -> nn.Module:
    """Return the module to rewrite; raise :class:`InvalidOption` if there is none."""
    if not callable(gm) or isinstance(gm, type):
        raise InvalidOption(
            f"rewrite({gm!r}): {type(gm).__name__} is nothing to rewrite. "
            "Give a GraphModule, a module or a function"
            + (", an instance: rewrite(Model())." if isinstance(gm, type) else ".")
        )
    owner = getattr(gm, "__self__", None)
    if isinstance(owner, nn.Module) and getattr(gm, "__name__", "") == "forward":
        gm = owner
    source = gm if isinstance(gm, nn.Module) else FunctionModule(gm)
    _check_source(source)
    return source


def _check_source(source: nn.Module) -> None:
    """Raise :class:`InvalidOption` for a module that cannot be called or shared.

    It has no forward, has uninitialized parameters, or keeps attributes in ``__slots__``.
    """
    kind = type(source).__name__
    if getattr(source.forward, "__func__", None) is nn.Module.forward:
        raise InvalidOption(
            f"rewrite({kind}): a {kind} has no forward. "
            "Give the module that calls what is in it, or nn.Sequential of it."
        )
    if isinstance(source, LazyModuleMixin) and source.has_uninitialized_params():
        raise InvalidOption(
            f"rewrite({kind}): its parameters have no shapes before its first call. "
            "Call it once, then rewrite it."
        )
    if any(vars(base).get("__slots__") for base in type(source).__mro__):
        raise InvalidOption(
            f"rewrite({kind}): it keeps attributes in __slots__, which no other object can share. "
            "Leave __slots__ out."
        )


def _arguments(source: nn.Module, example_inputs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return example inputs as (args, kwargs).

    Raises :class:`InvalidOption` if they do not fit the module's signature.
    """
    # A fake tensor of another trace tells no more than its geometry.
    example_inputs = pytree.tree_map_only(FakeTensor, real_like, example_inputs)
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example_inputs, Mapping):
        kwargs = dict(example_inputs)
    else:
        args = (
            tuple(example_inputs)
            if isinstance(example_inputs, (tuple, list))
            else (example_inputs,)
        )
    signature = inspect.Signature(parameters_of(source.forward))
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidOption(
            f"example_inputs do not fit: {error}. The module takes {signature}; "
            "give a tuple of positional arguments or a dict by name."
        ) from error
    return args, kwargs
