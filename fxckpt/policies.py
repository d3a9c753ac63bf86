"""Policies: what the user fixes before the planner decides the rest. The same ones go into every door.

============================================  ======================================================  =========================
policy                                        what it names                                           of the rest it says
============================================  ======================================================  =========================
``save_all``                                  prefers to save everything                              -
``recompute_all``                             prefers to run everything again                         -
``save_matmuls``                              must save matrix products                               prefer to run it again
``save_attention``                            must save what attention kernels give                   prefer to run it again
``recompute_pointwise``                       prefers to run pointwise ops again                      prefer to save it
``sqrt_n``                                    must save what crosses about sqrt(n) boundaries         prefer to run it again
``every(n)``, ``every(n, of=policy)``         must save every n-th value (that ``of`` saves)          prefer to run it again
``block_boundaries("layers.*")``              must save what leaves the modules                       open outside the modules
``save_ops(torch.ops.aten.mm)``               must save what the ops give                             prefer to run it again
``save("layers.*.attn")``                     must save what the modules make                         open
``recompute("decoder.**.mlp.*")``             must run what the modules make again                    open
``save_only("attn_out")``                     must save the values of these names                     prefer to run it again
``save_any_except("attn_out")``               must run the values of these names again                prefer to save it
============================================  ======================================================  =========================

MUST binds at any budget, PREFER is done where there is no budget and weighed where there is one. What must not run twice (mutation, effects,
unknown ops, decisions that nobody demands) is saved whatever a policy prefers. Policies compose: ``a | b``, ``a & b``, ``~a``
(:class:`Policy` says how) and ``first_match(a, b)``.
"""

from __future__ import annotations

from typing import Any

from fxckpt.errors import InvalidOption
from fxckpt.policy import FirstMatch, Function, Policy, Value, decide_all

__all__ = ["Policy", "Value", "as_policy", "decide_all", "first_match"]

FORMS = (
    "Give one of fxckpt.policies (save_matmuls, save('layers.*.attn'), ...), a function policy(ctx, op, *args, **kwargs) that returns a "
    "CheckpointPolicy, a list of ops to save, or a list of policies."
)


def as_policy(policy: Any) -> Policy | None:
    """Return the policy that a user means; None for None.

    Takes a :class:`Policy`; a function ``policy(ctx, op, *args, **kwargs) -> CheckpointPolicy`` (torch's own form); a list of ops, which are
    saved, all else run again (torch's own form as well); or a list of these, which all apply, as ``|`` has it. Raises
    :class:`InvalidOption` for anything else.
    """
    if policy is None or isinstance(policy, Policy):
        return policy
    if callable(policy) and not isinstance(policy, type):
        return Function(policy)
    raise InvalidOption(f"policy={policy!r} is not a policy. {FORMS}")


def first_match(*policies: Any) -> Policy:
    """Return the policy that asks ``policies`` in order: the first that does not leave a value open decides it."""
    return FirstMatch(tuple(p for p in map(as_policy, policies) if p is not None))
