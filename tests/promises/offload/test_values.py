"""Values that are sent away: the same bits, no race, no wait forgotten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import fxckpt
from fxckpt.tiers import Host
from fxckpt.tiers.ops import fetched, sent
from fxckpt.tiers.tier import Copy
from tests.models.zoo import ENTRIES, Entry
from tests.promises.offload.stack import OFTEN, compiled, stack
from tests.promises.test_models import Trial, same
from tests.steps import differing, fresh, outcome
from tests.tiers.adversary import Adversary


@pytest.mark.parametrize(
    ("entry", "late"),
    [
        pytest.param(
            entry,
            late,
            id=f"{entry.name}-{'late' if late else 'early'}",
            marks=() if entry.name in OFTEN[late] else pytest.mark.sweep,
        )
        for entry in ENTRIES
        for late in (True, False)
    ],
)
def test_models_are_free_of_races(entry: Entry, late: bool) -> None:
    """Gradients are those of the uncheckpointed step, peaks those of the plan, on any link."""
    trial = Trial(entry)
    expected = trial.step(torch.compile(trial.model, backend="aot_eager_default_partitioner"))
    torch._dynamo.reset()
    host = Adversary(late=late)
    forward, backend = compiled(trial.model, host, 0.7)
    assert same(expected, trial.step(forward)) == []
    (plan,) = backend.plans
    assert plan.offloads
    assert host.sent == host.fetched == len(plan.offloads)
    assert same(expected, trial.step(forward)) == []
    host.restart_peak()
    measured = trial.peak(forward)
    assert measured <= (plan.budget_bytes or 0)
    assert abs(measured - plan.peak_bytes) <= 0.01 * plan.peak_bytes
    assert host.peak_bytes == plan.away_bytes
    assert host.used_bytes == 0


def test_values_read_twice_come_back_twice() -> None:
    """A second backward of one forward fetches again, with the same gradients."""
    model, (x,) = stack()
    host = Adversary(late=True)
    forward, backend = compiled(model, host)
    loss = forward(x).square().sum()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    loss.backward()
    second = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert host.fetched == 2 * host.sent == 2 * len(backend.plans[0].offloads)
    del loss
    assert host.used_bytes == 0


def test_verified_recomputes_go_with_values_away() -> None:
    """Checksums hold of recomputed values, and of fetched ones."""
    make = stack
    model, inputs = fresh(make)
    expected = outcome(model, model, inputs)
    model, inputs = fresh(make)
    host = Adversary(late=True, limit="150KiB")
    forward, backend = compiled(model, host, 0.25, verify="exact")
    assert differing(expected, outcome(model, forward, inputs)) == []
    assert backend.plans[0].offloads and backend.plans[0].schedule


class Faulty(Host):
    """A host that flips a bit of what it gives back."""

    def fetch(self, held: Tensor, value: Tensor) -> Copy:
        """Begin to fetch a value, with a bit changed."""
        super().fetch(held, value).result()
        storage = value.untyped_storage()
        storage[7] ^= 1
        return super().fetch(held.new_empty(0), value.new_empty(0))


def test_a_flipped_bit_is_found() -> None:
    """Under ``verify="exact"`` a value that came back changed is named."""
    model, (x,) = stack()
    forward, backend = compiled(model, Faulty("1GiB", 1e9), verify="exact")
    loss = forward(x).square().sum()
    with pytest.raises(fxckpt.OffloadMismatch, match="came back from where it was sent") as caught:
        loss.backward()
    names = [repr(offload.name) for offload in backend.plans[0].offloads]
    assert any(str(caught.value).startswith(name) for name in names)


Break = Callable[[fx.Graph], None]


def _read_before_the_wait(graph: fx.Graph) -> None:
    """The reader of a fetched value reads it before the wait."""
    for node in graph.find_nodes(op="call_function", target=fetched):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def _save_before_the_wait(graph: fx.Graph) -> None:
    """The copy is saved, and fetched, though nothing waited for it."""
    for node in graph.find_nodes(op="call_function", target=sent):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def _let_go_before_the_last_reader(graph: fx.Graph) -> None:
    """A value is freed right after it is sent, before the forward has read it."""
    for node in graph.find_nodes(op="call_function", target=sent):
        node.args[0].append(node)


@pytest.mark.parametrize(
    "break_edge", [_read_before_the_wait, _save_before_the_wait, _let_go_before_the_last_reader]
)
def test_a_missing_edge_becomes_nan(break_edge: Break) -> None:
    """Without one of the edges that the ops hang on, the late link gives NaN gradients."""

    def broken(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        break_edge(gm.graph)
        gm.recompile()
        return gm.forward

    model, (x,) = stack()
    forward, backend = compiled(model, Adversary(late=True), inner=broken)
    forward(x).square().sum().backward()
    assert backend.plans[0].offloads
    assert any(bool(p.grad.isnan().any()) for p in model.parameters() if p.grad is not None)
