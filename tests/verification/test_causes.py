"""Causes of differences, from logs of a few calls."""

from __future__ import annotations

from typing import Any

import torch

from fxckpt.verification.causes import causes
from fxckpt.verification.op_log import OpCall, OpLog, OpRead, Write

WEIGHT = 7
"""Address of the storage that the logs name."""


def call(op: str, reads: str, gives: str, **options: Any) -> OpCall:
    """Return a call in module ``layer`` that reads and gives values by their digests."""
    tensors = tuple(OpRead(digest, WEIGHT, "float32 [4]") for digest in reads.split())
    found = {"is_random": False, "is_view": False, **options}
    return OpCall(op, "layer", tensors, "", tuple(gives.split()), **found)


def kinds(log: OpLog) -> list[tuple[str, str]]:
    """Return the kind and the place of each cause."""
    return [(finding.kind, finding.where) for finding in causes(log, {WEIGHT: "layer.weight"})]


def test_equal_recompute_has_no_cause() -> None:
    """The recompute may run a part of the forward, in any order."""
    forward = [call("mm", "x w", "h"), call("sin", "h", "y"), call("cos", "h", "z")]
    assert kinds(OpLog(forward, [forward[0], forward[2]])) == []


def test_new_draw_is_the_only_cause() -> None:
    """What reads the other mask is its consequence, and has no finding of its own."""
    forward = [call("bernoulli", "x", "mask", is_random=True), call("mul", "x mask", "y")]
    again = [call("bernoulli", "x", "other", is_random=True), call("mul", "x other", "wrong")]
    assert kinds(OpLog(forward, again)) == [("random", "layer")]


def test_op_that_does_not_repeat_is_named() -> None:
    """The same inputs gave something else, without a generator."""
    forward, again = [call("scatter_add", "x", "y")], [call("scatter_add", "x", "other")]
    (finding,) = causes(OpLog(forward, again), {})
    assert finding.kind == "recompute" and "not repeatable" in finding.advice


def test_changed_tensor_is_named_with_its_write() -> None:
    """An op that reads another value is traced to the last write of that storage."""
    log = OpLog([call("mm", "x w", "h")], [call("mm", "x changed", "wrong")])
    log.writes[WEIGHT] = Write("add_", "train.py:12")
    (finding,) = causes(log, {WEIGHT: "layer.weight"})
    assert (finding.kind, finding.where) == ("write", "layer.weight")
    assert finding.text.endswith("last written by add_ at train.py:12")


def test_op_of_another_path_is_named() -> None:
    """The forward ran no such op."""
    log = OpLog([call("relu", "x", "y")], [call("gelu", "x", "other")])
    assert kinds(log) == [("recompute", "layer")]


def test_view_of_wrong_value_has_no_finding() -> None:
    """A view computes nothing that could go wrong."""
    log = OpLog([call("t", "x", "y", is_view=True)], [call("t", "x", "other", is_view=True)])
    assert kinds(log) == []


def test_share_of_flipped_choices_is_told() -> None:
    """Choices are compared with the most similar call of that op and module."""
    scores = call("topk", "scores", "top", choices=(torch.tensor([0, 1, 2, 3]),))
    again = call("topk", "drifted", "top2", choices=(torch.tensor([0, 1, 2, 9]),))
    found = causes(OpLog([scores], [again]), {})
    (routing,) = (finding for finding in found if finding.kind == "routing")
    assert routing.size == 0.25 and "1 of 4 choices" in routing.text
