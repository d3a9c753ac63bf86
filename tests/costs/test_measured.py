"""Measured rates of this machine, and the state they leave alone."""

from __future__ import annotations

import torch

from fxckpt.costs import measured


def test_calibration_leaves_the_generator_alone() -> None:
    """The first plan on a machine changes no mask that is drawn after it."""
    before = torch.get_rng_state()
    figures = measured._calibrate()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(figure > 0 for figure in figures)
