"""Causes of differences, from logs of a few calls."""

from __future__ import annotations

from typing import Any

import torch

from fxckpt.verification.causes import causes
from fxckpt.verification.op_log import OpCall, OpLog, OpRead, Write

WRITE = Write("add_", "train.py:12", after=1)


def call(op: str, reads: str, gives: str, **options: Any) -> OpCall:
    """Return a call in module ``layer`` that reads and gives values by their digests.

    ``x:layer.weight`` is value ``x`` of that parameter.
    """
    tensors = tuple(read(*value.split(":")) for value in reads.split())
    found = {"is_random": False, "is_view": False, **options}
    return OpCall(op, "layer", tensors, "", tuple(gives.split()), **found)


def read(digest: str, holder: str | None = None) -> OpRead:
    return OpRead(digest, holder, "float32 [4]", WRITE if holder else None)


def kinds(log: OpLog) -> list[tuple[str, str]]:
    """Return the kind and the place of each cause."""
    return [(finding.kind, finding.where) for finding in causes(log)]


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
    (finding,) = causes(OpLog(forward, again))
    assert finding.kind == "recompute" and "not repeatable" in finding.advice


def test_changed_tensor_is_named_with_its_write() -> None:
    """An op that reads another value is traced to the last write of that storage."""
    forward = [call("mm", "x w:layer.weight", "h")]
    (finding,) = causes(OpLog(forward, [call("mm", "x changed:layer.weight", "wrong")]))
    assert (finding.kind, finding.where) == ("write", "layer.weight")
    assert finding.text.endswith("last written by add_ at train.py:12")


def test_changed_tensor_is_named_through_a_view() -> None:
    """The view of another value is no consequence: who reads it names what changed."""
    forward = [
        call("t", "w:layer.weight", "wt", is_view=True),
        call("mm", "x wt:layer.weight", "h"),
    ]
    again = [
        call("t", "changed:layer.weight", "ct", is_view=True),
        call("mm", "x ct:layer.weight", "wrong"),
    ]
    assert kinds(OpLog(forward, again)) == [("write", "layer.weight")]


def test_writes_before_the_forward_read_are_not_told() -> None:
    """They changed nothing in between."""
    forward = [call("sin", "x", "y"), call("mm", "y w:layer.weight", "h")]
    (finding,) = causes(OpLog(forward, [call("mm", "y changed:layer.weight", "wrong")]))
    assert finding.text.endswith(
        "is not what the forward read; last written by add_ at train.py:12"
    )
    late = [call("cos", "x", "z"), *forward]
    (finding,) = causes(OpLog(late, [call("mm", "y changed:layer.weight", "wrong")]))
    assert finding.text.endswith("is not what the forward read")


def test_tensors_of_the_recompute_are_no_writes() -> None:
    """An op that the forward ran on others reads a tensor of the recompute, with a right value."""
    forward = [call("clone", "x", "x"), call("topk", "h", "v"), call("div_", "v", "d")]
    assert kinds(OpLog(forward, [call("clone", "v", "v")])) == []


def test_other_path_over_right_tensors_is_named() -> None:
    """A region's input is as before, and another op than in the forward reads it or its view."""
    forward = [call("mul", "a:first", "b"), call("add", "b:second", "c")]
    assert kinds(OpLog(forward, [call("mul", "b:second", "other")])) == [("recompute", "layer")]
    view = call("t", "b:second", "bt", is_view=True)
    again = [view, call("mul", "bt:second", "other")]
    (finding,) = causes(OpLog(forward, again))
    assert (finding.kind, finding.text) == (
        "recompute",
        "the recompute runs mul() on other values than the forward",
    )


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
    found = causes(OpLog([scores], [again]))
    (routing,) = (finding for finding in found if finding.kind == "routing")
    assert routing.size == 0.25 and "1 of 4 choices" in routing.text
