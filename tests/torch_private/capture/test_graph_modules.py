"""Attributes and code of graph modules."""

from __future__ import annotations

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule

from fxckpt.torch_private import GRAPH_FIELDS, MODULE_FIELDS, with_code


def test_fields_of_a_graph_module_are_told_apart() -> None:
    """A user's attribute is in neither set; a parameter's and the graph's keepers are."""
    module = fx.symbolic_trace(nn.ReLU())
    module.mine = 3
    assert "mine" not in MODULE_FIELDS | GRAPH_FIELDS
    assert {"_parameters", "training"} <= MODULE_FIELDS
    assert "_graph" in GRAPH_FIELDS and not GRAPH_FIELDS & MODULE_FIELDS


def test_a_lazy_graph_module_gets_its_code() -> None:
    """The code of a lazy module is there after the call."""
    graph = fx.symbolic_trace(nn.ReLU()).graph
    lazy = _LazyGraphModule.from_graphmodule(fx.GraphModule(nn.ReLU(), graph))
    assert with_code(lazy) is lazy
    assert "relu" in vars(lazy)["_code"]


def test_other_modules_are_returned() -> None:
    """A module without a graph is returned as it is."""
    module = nn.ReLU()
    assert with_code(module) is module
