"""States of generators in graphs that run op by op."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fxckpt.torch_private import (
    FakeTensor,
    fake_rng_state,
    lower_rng,
    run_and_save_rng_state,
    run_with_rng_state,
)
from tests.passes.graphs import traced

RAND = torch.ops.aten.rand.default


def saves_and_replays() -> fx.GraphModule:
    """Return a graph that draws, and draws the same again from the saved state."""
    graph = fx.Graph()
    drawn = graph.call_function(run_and_save_rng_state, (RAND, [4]))
    drawn.meta["val"] = (torch.empty(5056, dtype=torch.uint8), torch.empty(4))
    parts = [graph.call_function(operator.getitem, (drawn, i)) for i in range(2)]
    again = graph.call_function(run_with_rng_state, (parts[0], RAND, [4]))
    again.meta["val"] = torch.empty(4)
    graph.output((parts[1], again))
    return fx.GraphModule({}, graph)


def test_lowered_ops_draw_the_same_numbers() -> None:
    """The replay gives the forward's numbers, and later draws go on as if it had not run."""
    module = saves_and_replays()
    lower_rng(module.graph)
    module.recompile()
    torch.manual_seed(0)
    first, again = module()
    after = torch.rand(2)
    torch.manual_seed(0)
    assert torch.equal(first, torch.rand(4)) and torch.equal(again, first)
    assert torch.equal(after, torch.rand(2))


def test_lowered_graphs_run_under_dispatch_modes() -> None:
    """A FLOP counter, which torch's higher-order ops refuse, counts the step."""
    module = saves_and_replays()
    lower_rng(module.graph)
    module.recompile()
    with FlopCounterMode(display=False) as counter:
        module()
    assert counter.get_total_flops() == 0


def test_other_ops_are_left_alone() -> None:
    """A graph without random ops is unchanged."""
    graph = traced(torch.sin, torch.ones(2)).graph
    before = str(graph)
    lower_rng(graph)
    assert str(graph) == before


def test_fake_states_have_the_size_of_real_ones() -> None:
    """The CPU's state is as large as ``torch.get_rng_state()``, and of the draw's trace."""
    assert fake_rng_state(torch.ones(2)).shape == torch.get_rng_state().shape
    with FakeTensorMode() as mode:
        state = fake_rng_state(torch.ones(2))
    assert isinstance(state, FakeTensor) and state.fake_mode is mode
