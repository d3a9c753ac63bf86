"""verify="exact": what runs again is compared with what the forward made, and the first op that differs is named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxckpt
from tests.models.zoo import ENTRIES
from tests.steps import FLOOR, same_at_every_budget
from tests.test_random import drawing, recompute_all


@pytest.fixture
def unsteady() -> Iterator[Any]:
    """An op whose every run gives something else, of which its author says that it does not."""
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


def test_the_op_that_differs_is_named(unsteady: Any) -> None:
    model = Unsteady(unsteady)
    backend = fxckpt.Backend(policy=recompute_all, inner="aot_eager", verify="exact")
    loss = torch.compile(model, backend=backend)(torch.randn(8, 16)).sum()
    with pytest.raises(
        fxckpt.RecomputeMismatch,
        match=r"'scale' \(fxckpt_unsteady.scale\) at .*test_recompute_checks.py:\d+ gave other values",
    ):
        loss.backward()


def test_without_it_nobody_notices(unsteady: Any) -> None:
    backend = fxckpt.Backend(policy=recompute_all, inner="aot_eager")
    torch.compile(Unsteady(unsteady), backend=backend)(torch.randn(8, 16)).sum().backward()
    assert any("scale" in name for name in backend.plans[0].recomputed)


@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES if e.name in ("gpt2", "resnet")], ids=lambda e: e.name
)
def test_real_models_repeat_themselves(entry: Any) -> None:
    plans = same_at_every_budget(entry.make, (0.6, FLOOR), verify="exact")
    assert plans[-1].schedule


@pytest.mark.parametrize("name", ["dropout", "attention", "rrelu", "gumbel_softmax"])
def test_draws_repeat_themselves(name: str) -> None:
    same_at_every_budget(drawing(name), (None,), policy=recompute_all, verify="exact")


def test_every_dtype_has_a_hash() -> None:
    def mixed(x: Tensor, weight: Tensor) -> Tensor:
        h = (x @ weight).to(torch.bfloat16).sin()
        c = torch.complex(h.float(), h.float().cos()).exp()
        return (c.real.double() * (h > 0) * torch.where(h > 0, 1, 2)).sin().tanh()

    make = lambda: (mixed, (torch.randn(8, 3), torch.randn(3, 5, requires_grad=True)))  # noqa: E731
    same_at_every_budget(make, (None,), policy=recompute_all, verify="exact")


def test_memory_that_is_filled_in_parts_is_no_false_alarm() -> None:
    def f(x: Tensor, weight: Tensor) -> Tensor:
        h = (x @ weight).tanh()
        parts = x.new_empty(64, 32)
        parts[:, :16] = h
        parts[:, 16:] = h.sin()
        return parts.sigmoid().exp()

    make = lambda: (f, (torch.randn(64, 16), torch.randn(16, 16, requires_grad=True)))  # noqa: E731
    same_at_every_budget(make, (None,), policy=recompute_all, verify="exact")
    same_at_every_budget(make, (0.8, FLOOR), verify="exact")


def test_off_it_costs_nothing() -> None:
    make = drawing("dropout")
    plain, exact = (
        same_at_every_budget(make, (FLOOR, FLOOR), verify=verify)[-1] for verify in (None, "exact")
    )
    assert plain == exact


@pytest.mark.parametrize(
    ("options", "says"),
    [({"verify": "bits"}, "not a way"), ({"verify": "exact", "inner": "inductor"}, "aot_eager")],
)
def test_what_cannot_be_verified_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(fxckpt.InvalidOption, match=says):
        fxckpt.Backend(**options)


def test_the_hash_sees_every_bit() -> None:
    from fxckpt.passes.transforms.recompute_checks import checksum

    values = torch.randn(5, 7)
    seen = {int(checksum(values))}
    for i in range(values.numel()):
        other = values.clone()
        other.view(-1)[i] = -other.view(-1)[i]
        seen.add(int(checksum(other)))
    assert len(seen) == 1 + values.numel()
    assert torch.equal(checksum(values.T), checksum(values.T.contiguous()))
    assert int(checksum(torch.tensor([0.0]))) != int(checksum(torch.tensor([-0.0])))
