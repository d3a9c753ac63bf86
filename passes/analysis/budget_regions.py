"""Budget regions: parts of a model with a budget of their own for their saved values.

Read from the annotations of ``fxckpt.budget`` and of torch's ``region_activation_memory_budget``
(:mod:`fxckpt.torch_private.capture.region_budgets`). The values of a region are those that its
forward ops write, generator states included; forward outputs are held by the user and do not count.

Leaves the graph alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from fxckpt.solver.cuts.saved_limits import least_bytes, least_bytes_together
from fxckpt.solver.program import Program, SavedLimit
from fxckpt.torch_private import region_keys

LINE = "budget region "
"""First words of the lines that regions add to the fingerprint of a graph."""


@dataclass(frozen=True)
class BudgetRegion:
    """A region, and the nodes traced in it."""

    name: str
    """The user's name, or the line of the source; entries of one line are numbered."""
    budget: int | float
    """Bytes as int, or a fraction as float."""
    nodes: frozenset[str]
    """Names of the nodes."""

    @property
    def line(self) -> str:
        """The region in the fingerprint of the graph."""
        members = hashlib.sha256(" ".join(sorted(self.nodes)).encode()).hexdigest()[:16]
        return f"{LINE}{self.budget!r} of {len(self.nodes)} nodes, {members}"


def budget_regions(nodes: Iterable[fx.Node], graph_budget: float = 1.0) -> tuple[BudgetRegion, ...]:
    """Return the regions of a graph, in the order in which they were entered.

    ``graph_budget`` is torch's budget for whole graphs; it is that of the ops in no region.
    """
    members: dict[tuple[int, int | float, str], set[str]] = {}
    free: set[str] = set()
    for node in nodes:
        if node.op != "call_function":
            continue
        keys = region_keys(node)
        for key in keys:
            members.setdefault(key, set()).add(node.name)
        if not keys:
            free.add(node.name)
    times: Counter[str] = Counter()
    found = []
    for (_, budget, name), names in sorted(members.items()):
        times[name] += 1
        shown = name if times[name] == 1 else f"{name} #{times[name]}"
        found.append(BudgetRegion(shown, budget, frozenset(names)))
    if graph_budget != 1.0:
        name = "torch._functorch.config.activation_memory_budget"
        found.append(BudgetRegion(name, graph_budget, frozenset(free)))
    return tuple(found)


def saved_limits(
    program: Program, regions: tuple[BudgetRegion, ...], default_saved: Iterable[int]
) -> tuple[SavedLimit, ...]:
    """Return the limits that the budgets of regions put on saved values.

    ``default_saved`` are the storages saved without a budget, where a fraction of 1.0 is. The least
    of regions with fractions is that of one plan, so that all of them can be kept at once.
    """
    nbytes = program.tables.bytes
    groups = [_storages(program, region) for region in regions]
    below = [i for i, r in enumerate(regions) if isinstance(r.budget, float) and r.budget < 1]
    least = {i: least_bytes(program, group) for i, group in enumerate(groups) if i not in below}
    together = least_bytes_together(program, [groups[i] for i in below])
    least |= dict(zip(below, together, strict=True))
    saved = frozenset(default_saved)
    result = []
    for i, (region, group) in enumerate(zip(regions, groups, strict=True)):
        default = max(least[i], sum(int(nbytes[s]) for s in group if s in saved))
        if isinstance(region.budget, int):
            allowed, text = region.budget, f"{region.budget} B"
        elif region.budget < 1:
            allowed = least[i] + int(region.budget * (default - least[i]))
            text = f"{region.budget:g}"
        else:
            allowed, text = sum(int(nbytes[s]) for s in group), "1"
        result.append(SavedLimit(region.name, group, allowed, text, least[i], default))
    return tuple(result)


def _storages(program: Program, region: BudgetRegion) -> tuple[int, ...]:
    """Return the storages that count for a region."""
    written = {
        s
        for op in program.ops
        if op.name in region.nodes
        for s in (*op.writes, *(() if op.rng_state is None else (op.rng_state,)))
        if not program.storages[s].is_output
    }
    return tuple(sorted(written))


def without_regions(lines: Iterable[str]) -> tuple[str, ...]:
    """Return a fingerprint without the lines of regions."""
    return tuple(line for line in lines if not line.startswith(LINE))
