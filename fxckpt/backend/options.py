"""Options of a backend: their names, the combinations that are refused, and the environment's."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torch import fx

from fxckpt import budgets
from fxckpt.errors import InvalidBudget, InvalidOption
from fxckpt.partitioner import NO_WAY, NOT_BITWISE
from fxckpt.plans.types import Plan
from fxckpt.policies import policy_named
from fxckpt.torch_private.inductor.options import inductor_options

InnerCompiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
INNER_NAMES = ("inductor", "aot_eager")
"""Inner compilers that have a name; others are functions."""
BUDGET, POLICY = "FXCKPT_BUDGET", "FXCKPT_POLICY"
"""Environment variables of ``backend="fxckpt"``."""
VARIABLES = (BUDGET, POLICY, "FXCKPT_STRICT", "FXCKPT_CACHE_DIR")
"""Environment variables of fxckpt."""
OPTIONS = (
    "budget",
    "policy",
    "inner",
    "cost",
    "verify",
    "mode",
    "options",
    "max_slowdown",
    "scope",
    "in_flight",
    "strict",
    "offload",
    "group",
    "tile",
)
SCOPES = ("step", "graph")
"""What a budget is for: all graphs of a step, or each graph alone."""


def check_inner(
    inner: object, verify: object, mode: str | None, options: Mapping[str, Any] | None
) -> None:
    """Raise :class:`InvalidOption` for options of a compile that do not fit together."""
    if verify not in (None, "exact"):
        raise InvalidOption(NO_WAY.format(verify))
    if not callable(inner) and inner not in INNER_NAMES:
        raise InvalidOption(
            f"inner={inner!r} is not an inner compiler. Use one of "
            f"{', '.join(map(repr, INNER_NAMES))}, or a callable "
            '(gm, example_inputs) -> callable. Example: fxckpt.Backend(inner="aot_eager").'
        )
    if verify == "exact" and inner == "inductor":
        raise InvalidOption(NOT_BITWISE)
    if inner != "inductor" and (mode or options):
        raise InvalidOption(
            f"mode={mode!r}, options={options!r} are Inductor's, and inner={inner!r} is not. "
            "Leave them out, or use inner='inductor'."
        )


def check_scope(scope: str, in_flight: int, strict: bool) -> None:
    """Raise :class:`InvalidOption` for options of a step's budget that do not fit together."""
    if scope not in SCOPES:
        raise InvalidOption(f"scope={scope!r} is not a scope of a budget. Use 'step' or 'graph'.")
    if not isinstance(in_flight, int) or isinstance(in_flight, bool) or in_flight < 1:
        raise InvalidOption(
            f"in_flight={in_flight!r} is not a number of forwards. Give an int from 1 up."
        )
    if scope != "step" and (in_flight != 1 or strict):
        raise InvalidOption(
            f"in_flight={in_flight!r}, strict={strict!r} are for the budget of a step, and "
            f"scope={scope!r}. Use scope='step', or leave them out."
        )


def check_offload(offload: object, group: object, inductor: Mapping[str, Any]) -> None:
    """Raise :class:`InvalidOption` for an offload that the other options rule out.

    CUDA graphs are among them: a replay uses the addresses of the first run, and each call sends to
    other memory of the host.
    """
    if offload is None:
        return
    if inductor.get("triton.cudagraphs"):
        raise InvalidOption(
            f"offload={offload!r} with CUDA graphs (mode='reduce-overhead', or the option "
            "triton.cudagraphs): a replay cannot send values away. Leave one of them out."
        )
    if group is not None:
        raise InvalidOption(
            f"offload={offload!r}, group={group!r}: each rank has a link of its own, and ranks "
            "that plan as one send nothing away. Use one of the two."
        )


def check_tile_with(tile: object, group: object) -> None:
    """Raise :class:`InvalidOption` for tiles that the other options rule out."""
    if tile is None:
        return
    if group is not None:
        raise InvalidOption(
            f"tile={tile!r}, group={group!r}: tiles are planned for one process. Use one of the "
            "two."
        )


def call_text(budget: budgets.Budget, **options: object) -> str:
    """Return the call that makes a backend, with those options that are not the usual ones."""
    usual = {"policy": None, "inner": "inductor", "in_flight": 1}
    given = {"budget": budget, **{k: v for k, v in options.items() if v != usual[k]}}
    return f"Backend({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def given_by_name(
    options: Mapping[str, Any] | None, mode: str | None, unknown: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a backend that ``torch.compile(backend="fxckpt")`` was given.

    Inductor's own options, which may stand among them, become ``options``. Raises
    :class:`InvalidOption` for arguments and options that neither knows.
    """
    if unknown:
        raise InvalidOption(
            f"unknown argument {next(iter(unknown))!r} for backend='fxckpt'. Give "
            "options={...}, or mode=...."
        )
    if options is not None and not isinstance(options, Mapping):
        raise InvalidOption(
            f"options={options!r} is a {type(options).__name__}. Give a dict: "
            "options={'budget': '2GiB'}."
        )
    ours = {name: value for name, value in (options or {}).items() if name in OPTIONS}
    inductor = {name: value for name, value in (options or {}).items() if name not in OPTIONS}
    if mode is not None:
        ours["mode"] = mode
    if inductor:
        _refuse_misspelt(inductor)
        ours["options"] = {**(ours.get("options") or {}), **inductor}
    return ours


def by_environment(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the budget and the policy that the environment gives, if they lack one.

    ``FXCKPT_BUDGET`` is a budget, ``FXCKPT_POLICY`` the name of one of :mod:`fxckpt.policies` or
    ``MODULE:NAME``. They serve programs that pass no options to a backend, such as trainers.

    Raises
    ------
    InvalidBudget, InvalidOption
        A variable is not usable.
    """
    given = dict(options)
    _warn_of_misspelt_variables()
    budget, policy = (os.environ.get(name, "") for name in (BUDGET, POLICY))
    is_planned = isinstance(given.get("policy"), Plan)
    if budget and not is_planned and not {"budget", "max_slowdown"} & set(given):
        try:
            given["budget"] = budgets.from_text(budget)
        except InvalidBudget as error:
            raise InvalidBudget(f"{BUDGET} in the environment: {error}") from error
    if policy and "policy" not in given:
        given["policy"] = policy_named(policy)
    return given


def _warn_of_misspelt_variables() -> None:
    """Warn of a variable in the environment that is almost one of fxckpt's."""
    for name in os.environ:
        near = get_close_matches(name, VARIABLES, 1, cutoff=0.85)
        if near and name not in VARIABLES:
            warnings.warn(
                f"{name} in the environment is no variable of fxckpt, and has no effect. Did you "
                f"mean {near[0]}?",
                stacklevel=2,
            )


def _refuse_misspelt(options: Mapping[str, Any]) -> None:
    """Raise :class:`InvalidOption` for options that Inductor does not know either."""
    try:
        inductor_options(None, options)
    except InvalidOption as error:
        near = [
            match
            for name in options
            for match in get_close_matches(str(name).lower(), OPTIONS, 1, cutoff=0.8)
        ]
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise InvalidOption(
            f"{error} {hint}Options of backend='fxckpt': {', '.join(OPTIONS)}. "
            "Example: torch.compile(model, backend='fxckpt', options={'budget': '2GiB'})."
        ) from error
