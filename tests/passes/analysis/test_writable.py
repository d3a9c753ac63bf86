"""Writable operands: what a result may be written into, read from a joint graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxckpt.passes.analysis.storage_table import Writable
from tests.passes.graphs import facts_of, traced


def written(function: Callable[..., Any], *inputs: Tensor) -> dict[str, tuple[str, ...]]:
    """The ops of a joint graph that may write in place, each with the operands."""
    inputs = inputs or (torch.ones(4), torch.ones(4))
    facts = facts_of(traced(function, *inputs), in_place=True)
    return {
        name: tuple(str(facts.op_node[name].args[i]) for i in positions)
        for name, positions in facts.in_place.items()
    }


def test_gradients_and_recomputed_values_may_be_written() -> None:
    """Values of either half may be, inputs and incoming gradients may not."""

    def f(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
        hidden = primals.sin()
        return hidden.exp(), (tangents * hidden) * primals + tangents

    assert written(f) == {"mul": ("sin",), "mul_1": ("mul",), "add": ("mul_1",)}


def test_program_has_the_storages_that_are_taken() -> None:
    """Ops of the program name storages; one that fills an output takes none."""

    def f(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
        return primals.sin().cos().exp(), tangents

    program = facts_of(traced(f, torch.ones(4), torch.ones(4)), in_place=True).program
    names = [s.name for s in program.storages]
    assert [[names[s] for s in op.takes] for op in program.ops] == [[], ["sin"], []]


def test_nothing_is_taken_unless_asked() -> None:
    """Facts for compilers that write kernels of their own take nothing."""

    def f(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
        return primals.sin().cos().exp(), tangents

    facts = facts_of(traced(f, torch.ones(4), torch.ones(4)))
    assert not facts.in_place
    assert not any(op.takes for op in (*facts.program.ops, *facts.program.backward))


def test_results_of_other_ops_are_not_written() -> None:
    """A user's op may return its argument unseen, whatever its schema says."""
    with torch.library._scoped_library("in_place_test", "FRAGMENT") as library:
        library.define("same(Tensor x) -> Tensor")
        library.impl("same", lambda x: x.clone(), "CompositeExplicitAutograd")

        def f(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.ops.in_place_test.same(primals.sin())
            return hidden.cos().exp(), tangents

        assert written(f) == {}


def test_views_of_one_storage_are_not_mixed() -> None:
    """An op that reads a storage by two views writes none of them; by one alone it may."""

    def f(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
        hidden = primals.sin()
        mixed = hidden + hidden.t()
        square = mixed * mixed
        return square.exp(), tangents

    assert written(f, torch.ones(4, 4), torch.ones(4, 4)) == {"mul": ("add",)}


def test_written_storages_are_left_alone() -> None:
    """A storage that the graph itself writes is no operand to write."""

    def f(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
        hidden = primals.sin()
        torch.ops.aten.add_.Tensor(hidden, primals)
        return hidden.cos().exp(), tangents

    assert "cos" not in written(f)


def test_copies_between_devices_guard_their_operands() -> None:
    """A copy to another device may still be reading when the next op runs."""

    def f(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
        hidden = primals.sin()
        return hidden.to("meta", non_blocking=True).sum(), hidden.cos().exp() * tangents

    joint = traced(f, torch.ones(4), torch.ones(4))
    sin = next(n for n in joint.graph.nodes if n.name == "sin")
    cos = next(n for n in joint.graph.nodes if n.name == "cos")
    assert not Writable.of(joint.graph, ()).operands(cos)
    exp = next(n for n in joint.graph.nodes if n.name == "exp")
    assert Writable.of(joint.graph, ()).operands(exp) == (0,)
    assert sin.users
