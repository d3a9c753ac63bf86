"""Capture by Dynamo, and its errors as a user reads them."""

from __future__ import annotations

import logging
import pickle
import traceback
from functools import partial
from typing import NoReturn

import pytest
import torch
from torch import Tensor, fx, nn

import fxckpt
from fxckpt.torch_private import (
    break_after,
    calling_line,
    capture_whole,
    compile_whole,
    is_cut_short,
    is_recording,
    is_traced,
    make_boxed,
    modules_of,
    through_dynamo,
)


def captured(function: object, *inputs: Tensor) -> list[str]:
    """Return the kinds of nodes of a captured graph, which Dynamo may clear after the capture."""
    found: list[str] = []

    def receive(gm: fx.GraphModule, given: object) -> None:
        found.extend(node.op for node in gm.graph.nodes)

    capture_whole(function, inputs, {}, receive)  # type: ignore[arg-type]
    return found


def test_capture_runs_nothing_and_leaves_the_module() -> None:
    """A module keeps its parameters and its buffers; one on the meta device is captured too."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert captured(net, torch.ones(4, 2))[-1] == "output"
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    with torch.device("meta"):
        assert captured(nn.Linear(2, 2), torch.ones(4, 2))


def test_capture_explains_an_op_that_fails() -> None:
    """The error names the op's complaint and the user's line, once."""
    with pytest.raises(
        fxckpt.CaptureError, match=r"does not run on these inputs[\s\S]*test_dynamo"
    ):
        captured(lambda x: x @ torch.ones(3, 3), torch.ones(2, 2))


def test_capture_logs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither Dynamo's metrics of its compile nor the loggers in the model say a word."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    loggers = [logging.getLogger(name) for name in ("", "torch._dynamo")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        assert captured(lambda x: loggers[0].warning("step") or x.sin(), torch.ones(2))
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert not [record.getMessage() for record in records]


def test_whole_functions_refuse_graph_breaks() -> None:
    """A compiled whole function raises at its call, without Dynamo's advice on itself."""

    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x.sin()

    with pytest.raises(fxckpt.CaptureError, match="graph break") as error:
        compile_whole(broken, "eager")(torch.ones(2))  # type: ignore[arg-type]
    assert "TORCHDYNAMO_VERBOSE" not in str(error.value)


def test_graphs_know_the_break_that_ends_them() -> None:
    """The graph before a break gives its line; the graph after it, none."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: object) -> object:
        graphs.append(gm)
        return gm.forward

    def broken(x: Tensor) -> Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    torch.compile(broken, backend=backend)(torch.ones(2))
    assert [is_cut_short(gm) for gm in graphs] == [True, False]
    reason, line = break_after(graphs[0])
    assert reason and line.startswith("test_dynamo.py:")


def test_module_paths_begin_at_the_function_s_module() -> None:
    """A method, a partial and a closure stand for their module; plain functions have no paths."""
    seen: list[str] = []

    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.ask())
            return x

    net = nn.Sequential(nn.Sequential(Asking()))
    for function in (net, net.forward, partial(net, torch.ones(1)), lambda x: net(x)):
        with modules_of(function) as module:
            seen.clear()
            net[0][0].ask = module
            net(torch.ones(1))
            assert seen == ["0.0"] and module() == ""
    with modules_of(torch.sin) as module:
        assert module() == ""


def test_the_calling_line_is_the_user_s() -> None:
    """It is the innermost line outside of torch and fxckpt."""
    assert calling_line().startswith("test_dynamo.py:")


def test_errors_pass_through_dynamo() -> None:
    """The copy is of the same class, has the same text and attributes, and wraps once."""
    error = fxckpt.BudgetInfeasible("no", floor_bytes=7, budget_bytes=3)
    passing = through_dynamo(error)
    assert isinstance(passing, fxckpt.BudgetInfeasible) and str(passing) == "no"
    assert (passing.floor_bytes, passing.budget_bytes) == (7, 3)
    assert through_dynamo(passing) is passing
    assert pickle.loads(pickle.dumps(error)).floor_bytes == 7


def test_errors_have_no_frames_of_dynamo() -> None:
    """Users see their own line; a defect keeps its frames and its cause."""

    def fail(error: Exception) -> traceback.TracebackException:
        def backend(gm: fx.GraphModule, example_inputs: object) -> NoReturn:
            raise through_dynamo(error)

        with pytest.raises(type(error)) as raised:
            torch.compile(torch.sin, backend=backend)(torch.ones(1))
        return traceback.TracebackException.from_exception(raised.value)

    told = fail(fxckpt.BudgetInfeasible("no", floor_bytes=7, budget_bytes=3))
    assert told.__cause__ is None and len(told.stack) < 5
    failed = fxckpt.PlanningFailed("a defect")
    failed.__cause__ = ZeroDivisionError("why")
    told = fail(failed)
    assert told.__cause__ is not None and len(told.stack) > 5


def test_inner_compilers_are_boxed() -> None:
    """A compiled function takes a list; a boxed one is kept; anything else is refused."""
    compiled = make_boxed(lambda gm, inputs: lambda x: x + 1)(None, [])  # type: ignore[arg-type]
    assert compiled([1]) == 2

    def already(args: list[int]) -> int:
        return args.pop()

    already._boxed_call = True  # type: ignore[attr-defined]
    assert make_boxed(lambda gm, inputs: already)(None, []) is already  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="returned int"):
        make_boxed(lambda gm, inputs: 3)(None, [])  # type: ignore[arg-type, return-value]


def test_modes_are_seen() -> None:
    """A dispatch mode is a recording; a trace is one too."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    seen: list[tuple[bool, bool]] = []

    def asking(x: Tensor) -> Tensor:
        seen.append((is_recording(), is_traced()))
        return x.sin()

    asking(torch.ones(2))
    with FlopCounterMode(display=False):
        asking(torch.ones(2))
    make_fx(asking)(torch.ones(2))
    assert seen == [(False, False), (True, False), (True, True)]
