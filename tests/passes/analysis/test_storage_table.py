"""Storage table: which storages each node holds, and which operands may be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxckpt.passes.analysis.storage_table import StorageTable, Writable
from fxckpt.torch_private import storage_id
from tests.passes.graphs import facts_of, traced


def example(primals: Tensor) -> Tensor:
    hidden = primals.sin()
    values, indices = hidden.view(2, 2).topk(1)
    return values + indices


def filled() -> tuple[StorageTable, dict[str, torch.fx.Node]]:
    """A table of the example, with ``sin`` inlined into ``topk``."""
    nodes = {node.name: node for node in traced(example, torch.ones(4)).graph.nodes}
    table = StorageTable()
    table.add_input(nodes["primals_1"])
    table.inline(nodes["sin"], nodes["sin"].meta["val"])
    table.alias(nodes["view"], nodes["view"].meta["val"])
    topk = nodes["topk"]
    table.fill(topk, topk.meta["val"], producer=0, is_tuple=True, is_savable=False)
    for item in ("getitem", "getitem_1"):
        table.add_item(nodes[item], topk)
    return table, nodes


def test_inputs_are_free() -> None:
    """Neither an input nor a value inlined from inputs holds a storage."""
    table, nodes = filled()
    assert [table.holds[nodes[n]] for n in ("primals_1", "sin", "view")] == [(), (), ()]


def views(primals: Tensor, tangents: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    first, second = tangents
    return primals[:2].view(2, 1), first.view(2, 1) * second.view(2, 1)


def test_gradients_of_views_have_their_own_storages() -> None:
    """Gradients that share an input's storage in the trace are no views of the input."""
    whole = torch.ones(6)
    graph = make_fx(views, tracing_mode="fake")(whole, (whole[2:4], whole[4:])).graph
    inputs, table = graph.find_nodes(op="placeholder"), StorageTable()
    ids = {storage_id(node.meta["val"]) for node in inputs}
    assert len(ids) == 1
    table.add_input(inputs[0])
    table.add_tangent(inputs[1])
    table.add_tangent(inputs[2])
    assert [s.bytes for s in table.storages] == [2 * 4] * 2
    held = []
    for node in (n for n in graph.nodes if n.op == "call_function"):
        table.alias(node, node.meta["val"])
        held.append(table.holds[node])
    assert held[:-1] == [(), (), (0,), (1,)]
    assert not table.is_new(*ids)


def test_items_name_the_storages_of_a_tuple() -> None:
    """Each item owns one of its op's storages."""
    table, nodes = filled()
    assert [storage.name for storage in table.storages] == ["getitem", "getitem_1"]
    assert [table.holds[nodes[n]] for n in ("topk", "getitem", "getitem_1")] == [(0, 1), (0,), (1,)]
    assert table.owner == {n: nodes[n] for n in ("getitem", "getitem_1")}
    assert table.reads(nodes["add"]) == (0, 1)
    assert table.bytes_of((0, 1)) == 2 * 4 + 2 * 8


def test_output_may_be_saved() -> None:
    """A forward output lives to the end, so saving it is free."""
    table, nodes = filled()
    table.mark_output(nodes["getitem"])
    assert [(s.is_output, s.is_savable) for s in table.storages] == [(True, True), (False, False)]
    table.allow_saving((1,))
    assert table.storages[1].is_savable


def test_generator_state_is_a_storage() -> None:
    """The state is added behind the storages of its op."""
    table, nodes = filled()
    position = table.add_rng_state(nodes["sin"], 5056)
    assert table.storages[position].name == "sin.rng_state"
    assert table.bytes_of((position,)) == 5056


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
