"""Workspace of kernels, measured by the allocator's events, on a GPU by its statistics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from fxckpt.costs import workspace
from fxckpt.costs.isolated_op import IsolatedOp
from fxckpt.costs.workspace import MeasuredWorkspace, metered
from fxckpt.memory_meter import AcceleratorMeter, meter_of
from fxckpt.torch_private import FakeTensor, move_fake
from tests.costs.nodes import node_of


def test_a_pointwise_op_has_none() -> None:
    """An op that allocates only its result has no workspace."""
    assert MeasuredWorkspace()(node_of(lambda x: x.sin(), torch.ones(64, 64))) == 0


def test_a_sort_has_some() -> None:
    """A sort along a strided dimension copies at least a part of its operand."""
    assert MeasuredWorkspace()(node_of(lambda x: x.sum(0).cumsum(0), torch.ones(4, 4))) >= 0
    node = node_of(
        lambda x, w: F.conv2d(x, w, padding=1), torch.ones(4, 8, 16, 16), torch.ones(8, 8, 3, 3)
    )
    assert MeasuredWorkspace()(node) > 0


def test_each_call_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal calls run once, others again."""
    ran: list[int] = []
    real = workspace._measure
    monkeypatch.setattr(workspace, "_measure", lambda *op: (ran.append(1), real(*op))[1])
    measured = MeasuredWorkspace()
    for size in (8, 8, 9):
        measured(node_of(lambda x: x.cumsum(0), torch.ones(size)))
    assert len(ran) == 2


def test_dense_products_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that a BLAS reads in place is not measured; one with a copied operand is."""
    ran: list[int] = []
    real = workspace._measure
    monkeypatch.setattr(workspace, "_measure", lambda *op: (ran.append(1), real(*op))[1])
    x = torch.ones(8, 8)
    measured = MeasuredWorkspace()
    assert measured(node_of(lambda x: x @ x.t(), x)) == 0 and ran == []
    measured(node_of(lambda x: x @ x[:1].expand(8, 8), x))
    measured(node_of(lambda x: x @ x, x.bfloat16()))
    assert len(ran) == 2


def test_buffers_of_other_threads_count() -> None:
    """A kernel's buffers are workspace on whichever thread it takes them."""

    class Threaded:
        op = "an op"

        @staticmethod
        def call() -> contextlib.AbstractContextManager[Callable[[], torch.Tensor]]:
            def run() -> torch.Tensor:
                result = torch.empty(10, dtype=torch.uint8)
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(torch.empty, 1000, dtype=torch.uint8).result()
                return result

            return contextlib.nullcontext(run)

    assert workspace._measure(Threaded(), 10) == 1000


def test_off_the_cpu_nothing_is_measured() -> None:
    """An op on another device counts no workspace."""
    assert MeasuredWorkspace()(node_of(lambda x: x.cumsum(0), torch.ones(8, device="meta"))) == 0


def test_an_op_that_refuses_is_planned_as_none(caplog: pytest.LogCaptureFixture) -> None:
    """An op that raises on synthetic inputs counts none, and the log says so."""
    node = node_of(lambda a: torch.linalg.cholesky_ex(a, check_errors=True)[0], -torch.eye(3))
    refusing = next(n for n in node.graph.nodes if "cholesky" in str(n.target))
    with caplog.at_level("INFO", "fxckpt"):
        assert MeasuredWorkspace()(refusing) == 0
    assert "not measured" in caplog.text


def first_op(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.Node:
    """Return the first op of a traced function."""
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return next(n for n in graph.nodes if n.op == "call_function")


def test_meter_finds_what_events_find() -> None:
    """By a meter an op has the workspace that the allocator's events show."""
    meter = meter_of("cpu")
    if not meter.exact:
        pytest.skip("needs a C++ compiler")
    inputs = torch.randn(4, 4, 32, 32), torch.randn(4, 4, 3, 3)
    for function, given in (
        (lambda x, w: F.conv2d(x, w, padding=1), inputs),
        (lambda x, w: torch.sort(x)[0], inputs),
        (lambda x, w: x.exp(), inputs),
    ):
        node = first_op(function, *given)
        isolated = IsolatedOp.of(node)
        assert isolated is not None
        result = workspace._result_bytes(node)
        assert metered(meter, isolated, result) == MeasuredWorkspace()(node)


def on_gpu(node: fx.Node) -> fx.Node:
    """Say that the values around a node are on a GPU."""
    for value in (node, *node.all_input_nodes):
        for leaf in pytree.tree_leaves(value.meta["val"]):
            if isinstance(leaf, FakeTensor):
                move_fake(leaf, torch.device("cuda", 0))
    return node


class Statistics:
    """The statistics of a caching allocator, of calls that take 1536 bytes and keep 1024."""

    def __init__(self) -> None:
        self.now = self.peak = 4096

    def read(self) -> tuple[int, int]:
        return self.now, self.peak

    def restart(self) -> None:
        self.peak = self.now

    def call(self) -> object:
        self.peak = max(self.peak, self.now + 1536)
        self.now += 1024
        return object()


def test_gpu_is_read_by_its_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the peak of one run, less its result in whole blocks, is the workspace."""
    statistics = Statistics()
    meter = AcceleratorMeter(statistics.read, statistics.restart)
    monkeypatch.setattr(workspace, "meter_of", lambda device: meter)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    class Fake(IsolatedOp):
        def call(self) -> Any:
            return contextlib.nullcontext(statistics.call)

    node = on_gpu(first_op(lambda x: torch.sort(x, dim=0), torch.randn(100)))
    made = IsolatedOp.of(node)
    assert made is not None
    fake = Fake(made.op, made.leaves, made.spec, made.key)
    monkeypatch.setattr(IsolatedOp, "of", classmethod(lambda cls, node: fake))
    # Values of 400 bytes and indices of 800 take blocks of 512 and 1024.
    assert workspace._result_bytes(node) == 1536
    assert MeasuredWorkspace()(node) == 1536 - 1024


def test_pointwise_op_is_not_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pointwise op has no workspace on a GPU; without one nothing is run."""

    def never(device: object) -> None:
        raise AssertionError("no meter is needed")

    monkeypatch.setattr(workspace, "meter_of", never)
    pointwise = on_gpu(first_op(torch.exp, torch.randn(100)))
    sort = on_gpu(first_op(lambda x: torch.sort(x), torch.randn(100)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert MeasuredWorkspace()(sort) == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert MeasuredWorkspace()(pointwise) == 0


def test_assertions_are_not_run() -> None:
    """An assertion is not run on synthetic inputs, which would fail it."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(1)
    op = torch.ops.aten._assert_async.msg
    assert IsolatedOp.of(graph.call_function(op, (x, "no"))) is None
