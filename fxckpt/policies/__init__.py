"""Policies: decisions fixed or preferred before planning. Every entry point takes them.

============================  ======================================  ====================
policy                        values it selects                       other values
============================  ======================================  ====================
``save_all``                  prefers to save all                     -
``recompute_all``             prefers to recompute all                -
``save_matmuls``              must save matrix products               prefer recomputing
``save_attention``            must save outputs of attention kernels  prefer recomputing
``recompute_pointwise``       prefers to recompute pointwise ops      prefer saving
``sqrt_n``                    must save at about sqrt(n) boundaries   prefer recomputing
``every(n)``                  must save every n-th value              prefer recomputing
``every(n, of=policy)``       must save every n-th that ``of`` saves  prefer recomputing
``block_boundaries("h.*")``   must save outputs of modules, prefers   open outside modules
                              to recompute inside them
``save_ops(aten.mm)``         must save outputs of ops                prefer recomputing
``save("h.*.attn")``          must save values of modules             open
``recompute("h.**.mlp.*")``   must recompute values of modules        open
``offload("layers.*")``       must send away values of modules        open
``tile("lm_head")``           none: the module may run in tiles       open
``save_only("attn_out")``     must save named values                  prefer recomputing
``save_any_except("attn")``   must recompute named values             prefer saving
``save_collectives``          must save what comes from other ranks   open
``gather_again``              must recompute gathers of inputs        open
============================  ======================================  ====================

MUST binds at any budget. PREFER is followed without a budget; with one, it breaks ties between
equally good plans. A value that must not be recomputed (mutation, effects, unknown ops, and
discrete ops that no policy must recompute) is saved whatever a policy prefers.
Policies compose: ``a | b``, ``a & b``, ``~a`` (see :class:`Policy`) and ``first_match(a, b)``.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fxckpt.errors import InvalidOption
from fxckpt.ops.classes import is_attention, is_matmul, is_pointwise
from fxckpt.policies.base import Disjunction, FirstMatch, Policy, Value, coerces, decide_all
from fxckpt.policies.communication import GatherAgain, SaveCollectives
from fxckpt.policies.segments import BlockBoundaries, Every, SqrtN
from fxckpt.policies.selectors import (
    ConstantPolicy,
    ModulesPolicy,
    NamesPolicy,
    OpClassPolicy,
    OpsPolicy,
    TilePolicy,
    overload_name,
)
from fxckpt.policies.torch_form import FunctionPolicy
from fxckpt.torch_private import HigherOrderOperator, OpOverload, overloads_of

__all__ = [
    "Policy",
    "Value",
    "as_policy",
    "block_boundaries",
    "decide_all",
    "every",
    "first_match",
    "gather_again",
    "offload",
    "recompute",
    "recompute_all",
    "recompute_pointwise",
    "save",
    "save_all",
    "save_any_except",
    "save_attention",
    "save_collectives",
    "save_matmuls",
    "save_only",
    "save_ops",
    "sqrt_n",
    "tile",
]

MUST_SAVE, PREFER_SAVE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE
MUST_CPU_OFFLOAD = CheckpointPolicy.MUST_CPU_OFFLOAD
MUST_RECOMPUTE, PREFER_RECOMPUTE = (
    CheckpointPolicy.MUST_RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE,
)

save_all: Policy = ConstantPolicy("save_all", PREFER_SAVE)
recompute_all: Policy = ConstantPolicy("recompute_all", PREFER_RECOMPUTE)
save_matmuls: Policy = OpClassPolicy(
    "save_matmuls",
    is_matmul,
    MUST_SAVE,
    PREFER_RECOMPUTE,
    "no matrix product (mm, addmm, bmm, ...)",
)
save_attention: Policy = OpClassPolicy(
    "save_attention",
    is_attention,
    MUST_SAVE,
    PREFER_RECOMPUTE,
    "no attention in one kernel (scaled_dot_product_attention, flex_attention); "
    "attention of separate ops is saved by save('**.attn')",
)
recompute_pointwise: Policy = OpClassPolicy(
    "recompute_pointwise", is_pointwise, PREFER_RECOMPUTE, PREFER_SAVE
)
sqrt_n: Policy = SqrtN()
save_collectives: Policy = SaveCollectives()
gather_again: Policy = GatherAgain()


def every(n: int, of: Any = None) -> Policy:
    """Save every n-th value, or every n-th value that the policy ``of`` saves; recompute the rest.

    ``of`` may have any form that :func:`as_policy` takes, except None, which counts all values.
    Raises :class:`~fxckpt.errors.InvalidOption` if ``n`` is not a whole number from 1 up.

    >>> every(2, of=save_matmuls)
    every(2, of=save_matmuls)
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise InvalidOption(
            f"every({n!r}): give a whole number from 1 up. "
            "every(1) saves all, every(2) half of the values."
        )
    return Every(n, None if of is None else as_part(of))


def block_boundaries(*patterns: str) -> Policy:
    """Save values read outside the matched module that made them; recompute its other values.

    Values made outside the matched modules are left open. Paths are matched as in :func:`save`.
    ``block_boundaries("layers.*")`` is ``torch.utils.checkpoint`` around every layer.
    Raises :class:`~fxckpt.errors.InvalidOption` without a pattern.

    >>> block_boundaries("layers.*")
    block_boundaries('layers.*')
    """
    return BlockBoundaries(_texts("block_boundaries", patterns, "layers.*"))


def save_ops(*ops: Any) -> Policy:
    """Save the outputs of these ops; recompute the rest.

    An op is a packet (``torch.ops.aten.mm``, for all its overloads), one overload
    (``torch.ops.aten.mm.default``), a higher-order op, or the result of
    ``torch.library.custom_op``.
    Raises :class:`~fxckpt.errors.InvalidOption` without an op, or for an object that is no op.

    >>> import torch
    >>> save_ops(torch.ops.aten.mm, torch.ops.aten.add.Tensor)
    save_ops(aten.mm, aten.add.Tensor)
    """
    return OpsPolicy(_op_names("save_ops", ops))


def save(*patterns: str) -> Policy:
    """Save the values made in these modules and their submodules; leave the rest open.

    A path is matched from the model down: ``*`` stands for text within one part
    (``"layers.*.attn"``), ``**`` for any number of parts (``"**.attn"``).
    Raises :class:`~fxckpt.errors.InvalidOption` without a pattern; planning raises
    :class:`~fxckpt.errors.PolicyMatchesNothing` for a pattern that no module matches.

    >>> save("layers.*.attn", "head")
    save('layers.*.attn', 'head')
    """
    return ModulesPolicy("save", _texts("save", patterns, "layers.*.attn"), MUST_SAVE)


def recompute(*patterns: str) -> Policy:
    """Recompute the values made in these modules and their submodules; leave the rest open.

    Paths are matched, and errors raised, as in :func:`save`.

    >>> recompute("decoder.**.mlp.*")
    recompute('decoder.**.mlp.*')
    """
    return ModulesPolicy(
        "recompute", _texts("recompute", patterns, "decoder.**.mlp.*"), MUST_RECOMPUTE
    )


def offload(*patterns: str) -> Policy:
    """Send the values made in these modules and their submodules away; leave the rest open.

    The backward fetches them. It needs a place to send them to: ``Backend(offload=...)``. Paths are
    matched, and errors raised, as in :func:`save`.

    >>> offload("layers.*.norm")
    offload('layers.*.norm')
    """
    return ModulesPolicy("offload", _texts("offload", patterns, "layers.*.norm"), MUST_CPU_OFFLOAD)


def tile(*patterns: str) -> Policy:
    """Let regions that begin in these modules and their submodules run in tiles; decide no value.

    Other regions stay whole. Tiles are chosen and priced as with ``Backend(tile="auto")``, or are
    as many as ``tile=`` says. Paths are matched as in :func:`save`; planning raises
    :class:`~fxckpt.errors.PolicyMatchesNothing` for a pattern without a region. It is added to
    other policies by ``|`` and :func:`first_match`.

    >>> tile("lm_head") | save_matmuls
    (tile('lm_head') | save_matmuls)
    """
    return TilePolicy(_texts("tile", patterns, "lm_head"))


def save_only(*names: str) -> Policy:
    """Save the values of these names; recompute the rest.

    Names are given by :func:`fxckpt.name`; globs are allowed.
    Raises :class:`~fxckpt.errors.InvalidOption` without a name; planning raises
    :class:`~fxckpt.errors.PolicyMatchesNothing` for a name that no value has.

    >>> save_only("attn_*")
    save_only('attn_*')
    """
    return NamesPolicy(
        "save_only", _texts("save_only", names, "attn_out"), MUST_SAVE, PREFER_RECOMPUTE
    )


def save_any_except(*names: str) -> Policy:
    """Recompute the values of these names; save the rest.

    Names are given, and errors raised, as in :func:`save_only`.

    >>> save_any_except("attn_*")
    save_any_except('attn_*')
    """
    return NamesPolicy(
        "save_any_except", _texts("save_any_except", names, "attn_out"), MUST_RECOMPUTE, PREFER_SAVE
    )


def first_match(*policies: Any) -> Policy:
    """Ask ``policies`` in order: the first that does not leave a value open decides it.

    ``first_match(save("layers.*.attn"), recompute_all)`` saves attention and recomputes the rest.
    A function in torch's form leaves a value open by returning None; policies that are None are
    skipped. Raises :class:`~fxckpt.errors.InvalidOption` without a policy.

    >>> first_match(save("layers.*.attn"), recompute_all)
    first_match(save('layers.*.attn'), recompute_all)
    """
    found = tuple(as_part(p) for p in policies if p is not None)
    if not found:
        raise InvalidOption(f"first_match() needs at least one policy. {FORMS}")
    return FirstMatch(found)


FORMS = (
    "Give one of fxckpt.policies (save_matmuls, save('layers.*.attn'), ...), "
    "a function policy(ctx, op, *args, **kwargs) that returns a CheckpointPolicy, "
    "a list of ops to save, a list of policies, or a name such as 'save_matmuls'."
)


def as_policy(policy: Any) -> Policy | None:
    """Convert any accepted form of a policy to a :class:`Policy`; return None for None.

    Accepts a :class:`Policy`, a list of policies (joined by ``|``), and the forms of
    ``torch.utils.checkpoint``: a function ``policy(ctx, op, *args, **kwargs) -> CheckpointPolicy``,
    a list of ops (saved; the rest is recomputed), or a ``context_fn`` (``functools.partial`` of
    ``create_selective_checkpoint_contexts``). For options that are text, the name of a policy of
    this package, or ``MODULE:NAME``.
    Raises :class:`~fxckpt.errors.InvalidOption` for anything else.

    >>> import torch
    >>> as_policy([torch.ops.aten.mm.default])
    save_ops(aten.mm.default)
    >>> as_policy([save_matmuls, save("layers.*.norm")])
    (save_matmuls | save('layers.*.norm'))
    >>> as_policy("save_matmuls")
    save_matmuls
    """
    if policy is None or isinstance(policy, Policy):
        return policy
    if isinstance(policy, (list, tuple)) and policy:
        if all(map(_is_op, policy)):
            # A list often serves several machines with different kernels, so an op that
            # the graph lacks is no error, as in torch.
            return OpsPolicy(_op_names("policy", policy), is_strict=False)
        return functools.reduce(Disjunction, [as_part(part) for part in policy if part is not None])
    if (
        isinstance(policy, functools.partial)
        and policy.func is create_selective_checkpoint_contexts
    ):
        return as_policy(
            policy.args[0] if policy.args else policy.keywords.get("policy_fn_or_list")
        )
    if (example := next((text for maker, text in MAKERS if policy is maker), None)) is not None:
        raise InvalidOption(
            f"policy={policy.__name__} makes policies, and is none itself: "
            f"call it, as in policy={example}."
        )
    if isinstance(policy, str) and (":" in policy or isinstance(globals().get(policy), Policy)):
        return as_policy(policy_named(policy))
    if callable(policy) and not isinstance(policy, type) and not _is_op(policy):
        return FunctionPolicy(policy)
    raise InvalidOption(f"policy={policy!r} is not a policy. {_hint(policy)}{FORMS}")


MAKERS: tuple[tuple[Callable[..., Policy], str], ...] = (
    (every, "every(2)"),
    (block_boundaries, "block_boundaries('layers.*')"),
    (save_ops, "save_ops(torch.ops.aten.mm)"),
    (save, "save('layers.*.attn')"),
    (recompute, "recompute('decoder.**.mlp.*')"),
    (offload, "offload('layers.*.norm')"),
    (tile, "tile('lm_head')"),
    (save_only, "save_only('attn_out')"),
    (save_any_except, "save_any_except('attn_out')"),
    (first_match, "first_match(save('layers.*.attn'), recompute_all)"),
)


def policy_named(text: str) -> Any:
    """Return the policy that a text names: one of this package, or ``MODULE:NAME``.

    Raises :class:`InvalidOption` if there is none.

    >>> policy_named("save_matmuls") == policy_named("fxckpt.policies:save_matmuls") == save_matmuls
    True
    """
    module, _, name = text.rpartition(":")
    try:
        return operator.attrgetter(name)(importlib.import_module(module or __name__))
    except (ImportError, AttributeError) as error:
        raise InvalidOption(
            f"there is no policy {text!r}: {error}. Give a name of fxckpt.policies, or "
            "MODULE:NAME. Examples: 'save_matmuls', 'train:my_policy'."
        ) from error


@coerces
def as_part(policy: Any) -> Policy:
    """Convert one policy of several, so that a function may leave a value to the others.

    Raises :class:`InvalidOption` for anything that is no policy, None included.
    """
    found = as_policy(policy)
    if found is None:
        raise InvalidOption(f"policy=None is not a policy. {FORMS}")
    return replace(found, is_part=True) if isinstance(found, FunctionPolicy) else found


def _is_op(op: Any) -> bool:
    return isinstance(op, HigherOrderOperator) or bool(overloads_of(op))


def _hint(policy: Any) -> str:
    if _is_op(policy):
        return f"To save what this op gives: save_ops(torch.ops.{policy}). "
    if isinstance(policy, str):
        return (
            f"To save what modules of this path make: save({policy!r}); "
            f"values of this name: save_only({policy!r}). "
        )
    return ""


def _texts(maker: str, patterns: tuple[Any, ...], example: str) -> tuple[str, ...]:
    if not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise InvalidOption(
            f"{maker}({', '.join(map(repr, patterns))}): give one or more texts. "
            f"Example: {maker}({example!r})."
        )
    return patterns


def _op_names(maker: str, ops: Any) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for op in ops:
        overloads = overloads_of(op)
        if isinstance(op, HigherOrderOperator):
            names[op.name()] = None
        elif not overloads:
            raise InvalidOption(
                f"{maker}: {op!r} is not an op. "
                "Give torch.ops.<namespace>.<name>, for example torch.ops.aten.mm."
            )
        elif isinstance(op, OpOverload):
            names[overload_name(op)] = None
        else:
            names[overload_name(overloads[0]).rpartition(".")[0]] = None
    if not names:
        raise InvalidOption(
            f"{maker}() needs at least one op. Example: save_ops(torch.ops.aten.mm)."
        )
    return tuple(names)
