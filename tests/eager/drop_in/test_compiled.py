"""Regions in compiled callers, and compiled code in regions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import fxckpt
from fxckpt import create_selective_checkpoint_contexts as selective
from tests.eager.drop_in.products import aten, save_products
from tests.eager.regions import plain, step
from tests.steps import differing


def test_a_decorated_function_compiles_as_a_region() -> None:
    """Dynamo captures a decorated function's call as one graph with the region's tags."""
    region = fxckpt.checkpoint(use_reentrant=False)(lambda x, w: (x @ w).sin() @ w)
    backend = fxckpt.Backend(inner="aot_eager")
    torch._dynamo.reset()
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    torch.compile(region, backend=backend, fullgraph=True)(x, w).sum().backward()
    assert "mm" in backend.plans[0].recomputed


def tags_of(function: Callable[[Tensor], Tensor]) -> dict[str, str]:
    """Compile a function without graph breaks; return the partitioner's checkpoint tags."""
    from functorch.compile import default_partition, make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    found: dict[str, str] = {}

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        found.update(
            (n.name, n.meta["recompute"].name)
            for n in joint.graph.nodes
            if n.meta.get("recompute") is not None
        )
        return default_partition(joint, inputs, **options)

    backend = aot_autograd(
        fw_compiler=lambda gm, _: make_boxed_func(gm.forward), partition_fn=partition
    )
    torch.compile(function, backend=backend, fullgraph=True)(
        torch.randn(4, 4, requires_grad=True)
    ).sum().backward()
    return found


W = torch.randn(4, 4)


def region_of_one(x: Tensor) -> Tensor:
    return (x @ W).sin()


def test_a_region_is_tagged_in_a_compiled_caller() -> None:
    assert tags_of(lambda x: fxckpt.checkpoint(region_of_one, x))["mm"] == "PREFER_RECOMPUTE"


def closing_over(x: Tensor) -> Tensor:
    saved = [aten.mm.default]
    return fxckpt.checkpoint(region_of_one, x, policy=lambda ctx, op, *a, **k: op in saved)  # type: ignore[no-any-return]


POLICIES_IN_COMPILED_CODE: dict[str, Callable[[Tensor], Tensor]] = {
    "partial": lambda x: fxckpt.checkpoint(
        region_of_one, x, context_fn=functools.partial(selective, save_products)
    ),
    "lambda": lambda x: fxckpt.checkpoint(
        region_of_one, x, context_fn=lambda: selective(save_products)
    ),
    "closure": closing_over,
    "policy": lambda x: fxckpt.checkpoint(region_of_one, x, policy=fxckpt.policies.save_matmuls),
    "ops": lambda x: fxckpt.checkpoint(region_of_one, x, policy=[aten.mm.default]),
}


@pytest.mark.filterwarnings("ignore:.*context_fn is passed:UserWarning")
@pytest.mark.parametrize(
    "function", POLICIES_IN_COMPILED_CODE.values(), ids=POLICIES_IN_COMPILED_CODE
)
def test_a_policy_arrives_in_a_compiled_caller(function: Callable[[Tensor], Tensor]) -> None:
    tags = tags_of(function)
    assert (tags["mm"], tags["sin"]) == ("MUST_SAVE", "PREFER_RECOMPUTE")


def test_compiled_code_in_a_region_runs_compiled() -> None:
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    inner = torch.compile(lambda x, w: (x @ w).sin(), backend=backend)
    region = lambda x, w: inner(x.cos(), w).exp()  # noqa: E731
    expected = step(region, plain)
    assert differing(expected, step(region, fxckpt.checkpoint)) == []
    assert len(graphs) == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_region_of_a_compiled_block(backend: str) -> None:
    inner = torch.compile(lambda x, w: (x @ w).sin().exp(), backend=backend)
    region = lambda x, w: inner(x.cos(), w).exp()  # noqa: E731
    expected, got = step(region, plain), step(region, fxckpt.checkpoint)
    assert differing(expected, got) == []
