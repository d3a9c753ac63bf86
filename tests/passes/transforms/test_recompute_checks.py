"""Recompute checks (``verify="exact"``): the first recomputed op that differs is named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import fxckpt
from fxckpt.passes.transforms.recompute_checks import checksum, insert_checks
from fxckpt.passes.transforms.rematerialize import rematerialize
from tests.models.zoo import ENTRIES
from tests.passes.graphs import chain, planned, text_of, traced
from tests.promises.test_random import drawing, recompute_all
from tests.steps import FLOOR, same_at_every_budget


@pytest.fixture
def unsteady() -> Iterator[Any]:
    """An op that never repeats itself, though it is registered as one that does."""
    runs = []
    with torch.library._scoped_library("fxckpt_unsteady", "FRAGMENT"):

        @torch.library.custom_op("fxckpt_unsteady::scale", mutates_args=())
        def scale(x: Tensor) -> Tensor:
            runs.append(1)
            return x * (1.0 + len(runs) * 2.0**-23)

        scale.register_fake(lambda x: torch.empty_like(x))
        scale.register_autograd(lambda ctx, gradient: gradient)
        fxckpt.register_op(scale, recompute=True)
        yield scale


class Unsteady(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.op(layer(x).sin()).tanh().sin()
        return x


def test_checks_of_a_chain() -> None:
    """The forward returns a checksum of ``sin``; the recomputed ``sin`` passes the check first."""
    joint = traced(chain, torch.ones(4), torch.ones(4))
    result = rematerialize(joint, *planned(joint), num_fwd_outputs=1)
    result = insert_checks(joint, result, num_fwd_outputs=1)
    assert [node.name for node in result.saved] == ["primals_1", "sin_checksum"]
    assert_expected_inline(
        text_of(joint.graph),
        """\
primals_1: input
tangents_1: input
sin = sin(primals_1)
sin_checksum = checksum(sin)
sin_1 = sin(sin)
cos = cos(sin)
sin_recompute = sin(primals_1)
sin_recompute_checked = checked(sin_recompute, sin_checksum, "'sin' (sin)")
cos_recompute = cos(sin_recompute_checked)
mul = mul(tangents_1, cos_recompute)
cos_1 = cos(primals_1)
cos_1_recompute = cos(primals_1)
mul_1 = mul(mul, cos_1_recompute)
return [sin_1, mul_1]""",
    )


def test_differing_op_is_named(unsteady: Any) -> None:
    """The error has name, op and source line of the op that does not repeat itself."""
    model = Unsteady(unsteady)
    backend = fxckpt.Backend(policy=recompute_all, inner="aot_eager", verify="exact")
    loss = torch.compile(model, backend=backend)(torch.randn(8, 16)).sum()
    with pytest.raises(
        fxckpt.RecomputeMismatch,
        match=r"'scale' \(fxckpt_unsteady.scale\) at .*test_recompute_checks.py:\d+ "
        "gave other values",
    ):
        loss.backward()


def test_default_does_not_check(unsteady: Any) -> None:
    """Without checks, the op is recomputed and nothing is raised."""
    backend = fxckpt.Backend(policy=recompute_all, inner="aot_eager")
    torch.compile(Unsteady(unsteady), backend=backend)(torch.randn(8, 16)).sum().backward()
    assert any("scale" in name for name in backend.plans[0].recomputed)


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(e, id=e.name, marks=pytest.mark.sweep if e.name == "gpt2" else ())
        for e in ENTRIES
        if e.name in ("gpt2", "resnet")
    ],
)
def test_real_models_repeat_themselves(entry: Any) -> None:
    """Models of torch's own ops pass the checks, with the same results."""
    plans = same_at_every_budget(entry.make, (0.6, FLOOR), verify="exact")
    assert plans[-1].schedule


@pytest.mark.parametrize("name", ["dropout", "attention", "rrelu", "gumbel_softmax"])
def test_draws_repeat_themselves(name: str) -> None:
    """A draw under its generator state passes the checks."""
    same_at_every_budget(drawing(name), (None,), policy=recompute_all, verify="exact")


def test_every_dtype_has_a_checksum() -> None:
    """Half, complex, boolean, integer and double values are checked."""

    def mixed(x: Tensor, weight: Tensor) -> Tensor:
        h = (x @ weight).to(torch.bfloat16).sin()
        c = torch.complex(h.float(), h.float().cos()).exp()
        return (c.real.double() * (h > 0) * torch.where(h > 0, 1, 2)).sin().tanh()

    make = lambda: (mixed, (torch.randn(8, 3), torch.randn(3, 5, requires_grad=True)))  # noqa: E731
    same_at_every_budget(make, (None,), policy=recompute_all, verify="exact")


def test_memory_filled_in_parts_passes() -> None:
    """Memory that is never written does not differ."""

    def f(x: Tensor, weight: Tensor) -> Tensor:
        h = (x @ weight).tanh()
        parts = x.new_empty(64, 32)
        parts[:, :16] = h
        parts[:, 16:] = h.sin()
        return parts.sigmoid().exp()

    make = lambda: (f, (torch.randn(64, 16), torch.randn(16, 16, requires_grad=True)))  # noqa: E731
    same_at_every_budget(make, (None,), policy=recompute_all, verify="exact")
    same_at_every_budget(make, (0.8, FLOOR), verify="exact")


def test_plans_are_the_same() -> None:
    """Checks change no plan."""
    make = drawing("dropout")
    plain, exact = (
        same_at_every_budget(make, (FLOOR, FLOOR), verify=verify)[-1] for verify in (None, "exact")
    )
    assert plain == exact


@pytest.mark.parametrize(
    ("options", "says"),
    [({"verify": "bits"}, "not a way"), ({"verify": "exact", "inner": "inductor"}, "aot_eager")],
)
def test_invalid_options_are_refused(options: dict[str, Any], says: str) -> None:
    """The error says which option cannot be had."""
    with pytest.raises(fxckpt.InvalidOption, match=says):
        fxckpt.Backend(**options)


def test_checksum_depends_on_every_bit() -> None:
    """The sign of one element, or of a zero, changes the checksum; strides do not."""
    values = torch.randn(5, 7)
    seen = {int(checksum(values))}
    for i in range(values.numel()):
        other = values.clone()
        other.view(-1)[i] = -other.view(-1)[i]
        seen.add(int(checksum(other)))
    assert len(seen) == 1 + values.numel()
    assert torch.equal(checksum(values.T), checksum(values.T.contiguous()))
    assert int(checksum(torch.tensor([0.0]))) != int(checksum(torch.tensor([-0.0])))
