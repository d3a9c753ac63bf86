"""Loss backward: one op in place of two, where nothing else reads what is between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from fxckpt.ops.kernels import cross_entropy_backward
from fxckpt.passes.losses import loss_backward
from fxckpt.passes.losses.loss_backward import join_loss_backward
from tests.passes.graphs import traced

aten = torch.ops.aten


def loss(primals_logits: Tensor, primals_target: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy, and the gradient of the logits."""
    scores = aten._log_softmax(primals_logits, 1, False)
    value, total = aten.nll_loss_forward(scores, primals_target, None, 1, -100)
    back = aten.nll_loss_backward(tangents, scores, primals_target, None, 1, -100, total)
    saved = scores.detach().detach()
    return value, aten._log_softmax_backward_data(back, saved, 1, torch.float32)


def read_twice(primals_logits: Tensor, primals_target: Tensor, tangents: Tensor) -> Tensor:
    """The gradient of the log-probabilities is read by another op too."""
    scores = aten._log_softmax(primals_logits, 1, False)
    _, total = aten.nll_loss_forward(scores, primals_target, None, 1, -100)
    back = aten.nll_loss_backward(tangents, scores, primals_target, None, 1, -100, total)
    return aten._log_softmax_backward_data(back, scores, 1, torch.float32) + back


def of_other_scores(primals_logits: Tensor, primals_target: Tensor, tangents: Tensor) -> Tensor:
    """The two ops read different log-probabilities."""
    scores = aten._log_softmax(primals_logits, 1, False)
    _, total = aten.nll_loss_forward(scores, primals_target, None, 1, -100)
    back = aten.nll_loss_backward(tangents, scores, primals_target, None, 1, -100, total)
    return aten._log_softmax_backward_data(back, scores * 2, 1, torch.float32)


def over_rows(primals_logits: Tensor, primals_target: Tensor, tangents: Tensor) -> Tensor:
    """The probabilities are normalized along the columns."""
    scores = aten._log_softmax(primals_logits, 0, False)
    _, total = aten.nll_loss_forward(scores, primals_target, None, 1, -100)
    back = aten.nll_loss_backward(tangents, scores, primals_target, None, 1, -100, total)
    return aten._log_softmax_backward_data(back, scores, 0, torch.float32)


GIVEN = (torch.randn(6, 9), torch.arange(6), torch.tensor(0.5))


@pytest.fixture
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Join losses of any size."""
    monkeypatch.setattr(loss_backward, "LARGE", 0)


def joined(function: Callable[..., object]) -> fx.GraphModule:
    """The graph of a function with joined losses, which computes the same bits."""
    module = traced(function, *GIVEN)
    join_loss_backward(module.graph)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*GIVEN), function(*GIVEN), rtol=0, atol=0)
    return module


@pytest.mark.usefixtures("_any_size")
def test_the_two_ops_are_one() -> None:
    """The op keeps the name of the second."""
    (node,) = joined(loss).graph.find_nodes(op="call_function", target=cross_entropy_backward)
    assert node.name == "_log_softmax_backward_data"
    assert_expected_inline(
        ", ".join(map(str, node.args)),
        """tangents_1, _log_softmax, primals_target_1, None, 1, -100, getitem_1, torch.float32""",
    )


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("function", [read_twice, of_other_scores, over_rows])
def test_other_losses_are_left_alone(function: Callable[..., object]) -> None:
    """What reads something else, or other rows, stays as it is."""
    graph = joined(function).graph
    assert not graph.find_nodes(op="call_function", target=cross_entropy_backward)


def test_small_losses_are_left_alone() -> None:
    """Their parts would take longer to launch than to compute."""
    assert not joined(loss).graph.find_nodes(op="call_function", target=cross_entropy_backward)
