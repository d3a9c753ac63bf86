"""The link of a program to a tier of memory, and what sending values there would reach."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from fxckpt.budgets import format_bytes
from fxckpt.costs.devices import Device
from fxckpt.errors import InvalidOption
from fxckpt.passes.analysis.joint import Facts
from fxckpt.passes.transforms.offload_ops import movable_storages
from fxckpt.plans.types import Plan
from fxckpt.policies.base import Policy
from fxckpt.solver.program import Link
from fxckpt.solver.search.candidates import SearchResult
from fxckpt.tiers import Tier


def with_link(
    facts: Facts,
    tier: Tier,
    sent: frozenset[fx.Node],
    device: torch.device,
    policy: Policy | None,
    named: Device | None,
) -> Facts:
    """Return the facts with the link of their program to a tier.

    ``sent`` are the nodes whose values ``policy``, or a checkpoint region, sends away; ``named`` is
    the device elsewhere that is planned for. Raises :class:`InvalidOption` where these values do
    not fit the tier.
    """
    program = facts.program
    if named is None or tier.has_given_rates:
        rates = tier.rates(device)
    else:
        rates = named.to_host, named.from_host
    movable = movable_storages(facts, device)
    written = (s for op in program.ops if facts.op_node[op.name] in sent for s in op.writes)
    required = movable.intersection(written)
    needed = sum(program.storages[s].bytes for s in required)
    if needed > tier.limit_bytes:
        raise InvalidOption(
            f"{sender(policy)} sends {format_bytes(needed)} away, and {tier!r} holds "
            f"{format_bytes(tier.limit_bytes)}. Raise its limit, or let it prefer what it demands "
            "(PREFER_CPU_OFFLOAD)."
        )
    link = Link(*rates, tier.limit_bytes, movable, required)
    return replace(facts, program=replace(program, link=link))


def sender(policy: Policy | None) -> str:
    """Return who sends values away: a policy, or a region of the model where there is none."""
    return "a checkpoint region of the model" if policy is None else f"the policy {policy!r}"


def check_fits(plan: Plan, tier: Tier) -> None:
    """Raise :class:`InvalidOption` for a plan that sends more away than a tier holds."""
    if plan.away_bytes > tier.limit_bytes:
        raise InvalidOption(
            f"the plan sends {format_bytes(plan.away_bytes)} away, and {tier!r} holds "
            f"{format_bytes(tier.limit_bytes)}. Raise its limit, or plan anew for this one."
        )


def offload_hint(tier: Tier | None, device: torch.device, facts: Facts, found: SearchResult) -> str:
    """Return what the error for a budget below the floor says of sending values away."""
    storages = movable_storages(facts, device)
    needed, peak = found.reach_away(facts.program, storages)
    if peak >= found.least_peak.simulation.peak_bytes:
        return ""
    reach, held = format_bytes(peak), format_bytes(needed)
    if tier is None:
        return (
            f" With offload=fxckpt.tiers.Host(...) and {held} there it could reach about {reach}."
        )
    return (
        f" {tier!r} holds {format_bytes(tier.limit_bytes)}; with {held} it could reach about "
        f"{reach}."
    )
