"""Graph snapshot: the labels of a joint graph's nodes."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from fxckpt.passes.analysis.graph_snapshot import module_path, op_name, snapshot_of, source_line
from tests.passes.graphs import facts_of, traced


def example(primals: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = primals.view(2, 2).topk(1)
    return values.exp(), tangents * indices


def test_labels_of_an_example() -> None:
    """Each node has a kind, an op, a shape and the storages it fills or aliases."""
    joint = traced(example, torch.ones(4), torch.ones(2, 1))
    labels = snapshot_of(joint.graph, facts_of(joint)).labels
    lines = (
        f"{x.name}: {x.kind} {x.op} {list(x.shape)} {x.dtype} {list(x.storages)}".rstrip()
        + (" backward" if x.is_backward else "")
        for x in labels
    )
    assert_expected_inline(
        "\n".join(lines),
        """\
primals_1: input  [4] float32 []
tangents_1: input  [2, 1] float32 [] backward
view: view view [2, 2] float32 []
topk: op topk [2, 1] float32 [1, 2]
getitem: part topk [2, 1] float32 [1]
getitem_1: part topk [2, 1] int64 [2]
exp: op exp [2, 1] float32 [3]
mul: op mul.Tensor [2, 1] float32 [4] backward""",
    )


def test_item_is_named_after_its_op() -> None:
    """``getitem`` nodes have the name of the op that returned the tuple."""
    graph = traced(example, torch.ones(4), torch.ones(2, 1)).graph
    names = {node.name: op_name(node) for node in graph.nodes if node.op == "call_function"}
    assert names["getitem"] == names["topk"] == "topk"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("L['self']", ""),
        ("L['self'].layers.0", "layers.0"),
        ("L['self']._modules['layers']._modules['0']", "layers.0"),
        ("getattr(L['self'].layers, '0')", "layers.0"),
        ("L['self']._orig_mod.head", "head"),
        ("layers.0", "layers.0"),
    ],
)
def test_module_path_as_named_modules_spells_it(path: str, expected: str) -> None:
    """Paths of every capture become the names that the user's model has."""
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"key": (path, torch.nn.Module)}
    assert module_path(node) == expected


def test_source_line_is_the_innermost() -> None:
    """The last frame of the stack is the line that called the op."""
    node = fx.Graph().placeholder("x")
    assert source_line(node) == ""
    node.meta["stack_trace"] = 'File "/a/run.py", line 3, in main\n File "/a/net.py", line 12, in f'
    assert source_line(node) == "net.py:12"
