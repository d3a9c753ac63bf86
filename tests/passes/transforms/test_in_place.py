"""Write in place: results go into operands that die in their half, and into nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from fxckpt.errors import VerifyError
from fxckpt.passes.analysis.graph_memory import emitted_peak
from fxckpt.passes.graphs import Joint
from fxckpt.passes.invariants import verify
from fxckpt.planner.planner import Planner
from fxckpt.policies import as_policy
from tests.passes.graphs import chain, text_of, traced

SIZE = 8


def halves(
    function: Callable[..., Any], *, recomputes: bool, in_place: bool = True
) -> tuple[fx.GraphModule, fx.GraphModule, Any]:
    """Halves of a joint graph of one forward output."""
    answer = CheckpointPolicy.MUST_RECOMPUTE if recomputes else CheckpointPolicy.MUST_SAVE
    planner = Planner(
        policy=as_policy(lambda ctx, op, *args, **kwargs: answer),
        cost="flops",
        measure_workspace=False,
        in_place=in_place,
    )
    joint = traced(function, torch.ones(SIZE), torch.ones(SIZE))
    return planner.partition(Joint(joint, 1))


def test_recomputed_values_are_written_into() -> None:
    """A recomputed value takes the gradient that is computed from it; an incoming one does not."""
    _, backward, _ = halves(chain, recomputes=True)
    assert_expected_inline(
        text_of(backward.graph),
        """\
primals_1: input
tangents_1: input
sin_recompute = sin(primals_1)
cos_recompute = cos(sin_recompute, out=sin_recompute)
mul = mul(tangents_1, cos_recompute, out=cos_recompute)
cos_1_recompute = cos(primals_1)
mul_1 = mul(mul, cos_1_recompute, out=mul)
return [mul_1]""",
    )


def test_saved_values_are_left_alone() -> None:
    """A second backward reads saved values again."""
    _, backward, _ = halves(chain, recomputes=False)
    assert_expected_inline(
        text_of(backward.graph),
        """\
cos: input
cos_1: input
tangents_1: input
mul = mul(tangents_1, cos)
mul_1 = mul(mul, cos_1, out=mul)
return [mul_1]""",
    )


def test_values_with_later_readers_are_left_alone() -> None:
    """A value that a later op reads, itself or by a view, keeps its memory."""

    def f(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
        hidden = primals.exp()
        shown = hidden.view(2, -1)
        once = hidden.cos()
        return once + shown.flatten(), tangents

    forward, _, _ = halves(f, recomputes=True)
    assert "cos = cos(exp)\n" in text_of(forward.graph)


def test_results_of_one_op_die_apart() -> None:
    """One of two results takes another value while the other is saved, as the plan counts it."""

    def f(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
        normal, _, scale = torch.ops.aten.native_layer_norm(primals, [SIZE], None, None, 1e-5)
        return normal.exp().cos(), tangents * scale

    forward, backward, plan = halves(f, recomputes=False)
    assert_expected_inline(
        text_of(forward.graph),
        """\
primals_1: input
native_layer_norm = native_layer_norm(primals_1, [8], None, None, 1e-05)
getitem = getitem(native_layer_norm, 0)
getitem_2 = getitem(native_layer_norm, 2)
exp = exp(getitem, out=getitem)
cos = cos(exp)
return [cos, getitem_2]""",
    )
    assert emitted_peak(forward, backward, num_fwd_outputs=1) == plan.peak_bytes


def test_outputs_have_memory_of_their_own() -> None:
    """The user is never given a view, which autograd would not let be written to."""

    def f(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
        return primals.exp().view(2, -1).cos().view(2, -1), tangents

    forward, _, _ = halves(f, recomputes=True)
    assert "out=" not in text_of(forward.graph)


def test_layout_must_be_that_of_the_result() -> None:
    """An operand of other strides, another type or a part of a storage keeps its memory."""

    def f(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
        turned = primals.exp().view(2, -1).t()
        halved = primals.exp().to(torch.bfloat16).sin().float()
        part = primals.sin()[: SIZE // 2].cos()
        return (turned.contiguous() + halved.sum() + part.sum()).view(-1), tangents

    forward, _, _ = halves(f, recomputes=True)
    assert_expected_inline(
        text_of(forward.graph),
        """\
primals_1: input
exp = exp(primals_1)
view = view(exp, [2, -1])
t = t(view)
_to_copy = _to_copy(exp, dtype=torch.bfloat16)
sin = sin(_to_copy, out=_to_copy)
_to_copy_1 = _to_copy(sin, dtype=torch.float32)
sin_1 = sin(primals_1)
slice_1 = slice(sin_1, 0, 0, 4)
cos = cos(slice_1)
clone = clone(t, memory_format=torch.contiguous_format)
sum_1 = sum(_to_copy_1)
add = add(clone, sum_1, out=clone)
sum_2 = sum(cos)
add_1 = add(add, sum_2)
view_1 = view(add_1, [-1])
return [view_1]""",
    )


def test_planner_without_it_writes_nothing() -> None:
    """Halves for a compiler of its own hold no writes, and their plan no spared bytes."""
    planned, apart = (halves(chain, recomputes=True, in_place=flag) for flag in (True, False))
    assert "out=" not in text_of(apart[0].graph) + text_of(apart[1].graph)
    assert apart[2].peak_bytes > planned[2].peak_bytes


def test_a_write_of_a_saved_value_is_refused() -> None:
    """The halves are verified after the pass: a saved value is only read."""
    forward, backward, plan = halves(chain, recomputes=False)
    (first, _) = backward.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor) + (
        backward.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.out)
    )
    first.target, first.kwargs = torch.ops.aten.mul.out, {"out": first.args[1]}
    with pytest.raises(VerifyError, match="writes the saved value 'cos'"):
        verify(forward, backward, plan)


STEPS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, y: x.sin(),
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: y.view(2, -1).t().contiguous().t().reshape(-1) - x,
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: (x.view(2, -1) + y.view(2, -1)).flatten(),
    lambda x, y: x.view(2, -1).softmax(-1).view(-1),
    lambda x, y: x.to(torch.float64).tanh().to(x.dtype),
    lambda x, y: x.detach(),
    lambda x, y: torch.index_put(x, [torch.tensor([1, 1])], y[:2], True),
    lambda x, y: y[SIZE // 2 :].repeat(2) + x,
    lambda x, y: x.masked_fill(y > 0, 0.5),
)


@st.composite
def functions(draw: st.DrawFn) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Draw a joint graph: a forward on the input, and a backward that also reads the tangent."""
    pick = st.tuples(st.integers(0, len(STEPS) - 1), st.integers(1, 4), st.integers(1, 4))
    first, second = (draw(st.lists(pick, min_size=1, max_size=6)) for _ in range(2))

    def extended(values: list[Tensor], steps: list[tuple[int, int, int]]) -> list[Tensor]:
        for step, i, j in steps:
            values.append(STEPS[step](values[-min(i, len(values))], values[-min(j, len(values))]))
        return values

    def f(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
        values = extended([primals], first)
        gradients = extended([*values, tangents], second)
        return values[-1].clone(), gradients[-1] + tangents

    return f


@given(function=functions(), recomputes=st.booleans())
def test_random_graphs_give_the_same_bits_twice(
    function: Callable[..., Any], recomputes: bool
) -> None:
    """Halves return what they return without writes, and again: nothing given is written.

    The peak read from the halves is the plan's.
    """
    forward, backward, plan = halves(function, recomputes=recomputes)
    apart = halves(function, recomputes=recomputes, in_place=False)
    x, tangent = torch.linspace(-2, 2, SIZE), torch.linspace(3, -1, SIZE)
    given_x, given_tangent = x.clone(), tangent.clone()
    with torch.no_grad():
        outcomes = []
        for one, other in ((forward, backward), apart[:2]):
            output, *saved = one(given_x)
            names = [n.name for n in one.graph.find_nodes(op="output")[0].args[0][1:]]
            values = dict(zip(names, saved, strict=True))
            values |= {"primals_1": given_x, "tangents_1": given_tangent}
            values = {n.name: values[n.name] for n in other.graph.find_nodes(op="placeholder")}
            outcomes += [(output, *other(*values.values())) for _ in range(2)]
    assert torch.equal(given_x, x) and torch.equal(given_tangent, tangent)
    for outcome in outcomes[1:]:
        assert all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(outcome, outcomes[0], strict=True)
        )
    assert emitted_peak(forward, backward, num_fwd_outputs=1) == plan.peak_bytes
