"""Byte counts: storages, not views; generator states by device."""

from __future__ import annotations

import torch

from fxckpt.passes.analysis.byte_counts import (
    gradient_bytes,
    replay_bytes,
    rng_state_bytes,
    storage_bytes,
)
from fxckpt.passes.transforms.rematerialize import rematerialize
from tests.passes.graphs import dropped, planned, traced


def test_view_counts_its_whole_storage() -> None:
    """A row of a 4 x 4 matrix keeps 64 bytes alive."""
    assert storage_bytes(torch.zeros(4, 4)[0]) == 64


def test_gradient_of_a_view_has_its_strides() -> None:
    """That of two columns of a 4 x 4 matrix has gaps; those of rows and of one number have none."""
    whole = torch.zeros(4, 4)
    columns, rows, repeated = whole[:, :2], whole[2:], whole[0, :1].expand(4)
    assert [gradient_bytes(t) for t in (columns, rows, repeated)] == [4 * 14, 4 * 8, 4 * 4]


def test_generator_state_of_cpu() -> None:
    """The CPU's Mersenne twister has the state that torch returns."""
    joint = traced(dropped, torch.ones(2, 2), torch.ones(2, 2))
    (mask,) = (node for node in joint.graph.nodes if node.name == "bernoulli")
    assert rng_state_bytes(mask) == torch.get_rng_state().nbytes


def test_replay_holds_the_present_state() -> None:
    """A recomputed random op sets one generator state aside; no other node does."""
    joint = traced(dropped, torch.ones(2, 2), torch.ones(2, 2))
    rematerialize(joint, *planned(joint), num_fwd_outputs=1)
    held = {node.name: replay_bytes(node) for node in joint.graph.nodes if replay_bytes(node)}
    assert held == {"bernoulli_recompute": torch.get_rng_state().nbytes}
