"""Differences between versions of torch, as far as one version can show them."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

import fxckpt
from fxckpt.cli.doctor import examine
from fxckpt.policies import save_matmuls
from fxckpt.policies.torch_form import AskedByOp
from fxckpt.torch_private import versions
from fxckpt.torch_private.autograd import selective_checkpoint


class ContextOf211:
    """``SelectiveCheckpointContext`` of torch 2.11, without ``op_output``."""

    def __init__(self, *, is_recompute: bool) -> None:
        self.is_recompute = is_recompute


def test_context_of_torch_2_11_gets_op_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy in torch's form reads the op's output even if torch's own context lacks it."""
    monkeypatch.setattr(selective_checkpoint, "SelectiveCheckpointContext", ContextOf211)
    shapes: list[torch.Size] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        shapes.append(ctx.op_output.shape)
        return False

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU())
    fxckpt.plan(model, torch.randn(2, 4), policy=policy)
    assert torch.Size([2, 8]) in shapes


def test_policy_called_before_op_decides_by_op() -> None:
    """A policy that torch 2.11 calls before the op runs decides by the op alone."""
    asked: Any = AskedByOp(save_matmuls)
    context = ContextOf211(is_recompute=False)
    assert (
        asked(context, torch.ops.aten.mm.default)
        is torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    )


@pytest.mark.parametrize(
    "command", [["-c", "import fxckpt"], ["-m", "fxckpt", "doctor"]], ids=["import", "command line"]
)
def test_old_torch_is_refused_in_one_line(command: list[str]) -> None:
    """A torch older than any tested one is refused with one clear line."""
    older = "import runpy, sys, torch; torch.__version__ = '2.10.1+cpu'; "
    run = command[1] if command[0] == "-c" else "sys.argv[0] = 'fxckpt'; runpy.run_module('fxckpt')"
    done = subprocess.run(
        [sys.executable, "-c", older + run], capture_output=True, text=True, check=False
    )
    assert done.returncode == (1 if command[0] == "-c" else 3)
    assert (
        "fxckpt needs torch 2.11.0 or newer, and torch 2.10.1+cpu is installed"
        in done.stderr.splitlines()[-1]
    )
    assert command[0] == "-c" or len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("version", ["main", "", "git1234+cpu"])
def test_version_without_numbers_is_newer(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch built without a version is taken for a newer one, which warns."""
    monkeypatch.setattr(torch, "__version__", version)
    assert versions.is_newer() and not versions.is_tested()
    versions.refuse_older()


def test_newer_torch_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch newer than any tested one makes the first compile of a process warn."""
    monkeypatch.setattr(torch, "__version__", "99.1.0a0+git1")
    versions.warn_of_newer.cache_clear()
    model, backend = torch.nn.Linear(4, 4), fxckpt.Backend(inner="aot_eager")
    with pytest.warns(
        UserWarning, match=r"torch 99\.1.* newer than any that fxckpt is tested with \(2\.11\.0"
    ):
        torch.compile(model, backend=backend)(torch.randn(2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(model, backend=backend)(torch.randn(3, 4))


@pytest.mark.parametrize(
    ("version", "state"),
    [("2.13.0+cpu", "ok"), ("2.13.1", "note"), ("2.12.0", "note"), ("99.0.0.dev1", "note")],
)
def test_doctor_names_tested_versions(
    version: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor lists the tested versions and says if the installed torch is none of them."""
    monkeypatch.setattr(torch, "__version__", version)
    (found,) = (f for f in examine(self_test=False).findings if f.what == "torch")
    assert found.state == state and "2.11.0, 2.13.0, 2.15.0" in found.effect
    assert ("none of those" in found.effect) == (state == "note")


def test_unreadable_lowering_of_newer_torch_is_planned_unfused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A name that a newer torch lacks costs precision, not the plan; elsewhere it is an error."""
    from fxckpt.torch_private.inductor import buffers

    def renamed(graph: Any) -> Any:
        raise AttributeError("module 'torch._inductor.ir' has no attribute 'Conditional'")

    monkeypatch.setattr(buffers, "read_schedule", renamed)
    monkeypatch.setenv("FXCKPT_STRICT", "0")
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4))
    )
    x = torch.randn(256, 64)
    model(x).square().mean().backward()
    expected = [p.grad for p in model.parameters()]
    with pytest.raises(fxckpt.errors.PlanningFailed, match="no attribute 'Conditional'"):
        torch.compile(model, backend=fxckpt.Backend(budget=0.9, scope="graph"))(x)

    monkeypatch.setattr(torch, "__version__", "99.1.0")
    versions.warn_of_newer.cache_clear()
    torch._dynamo.reset()
    model.zero_grad(set_to_none=True)
    backend = fxckpt.Backend(budget=0.9, scope="graph")
    with pytest.warns(UserWarning, match="newer than any that fxckpt is tested with"):
        torch.compile(model, backend=backend)(x).square().mean().backward()
    (plan,) = backend.plans
    assert plan.peak_bytes <= 0.9 * plan.baseline_peak_bytes and plan.compiled_peak_bytes is None
    assert "cannot be read (AttributeError" in caplog.text
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


def test_newer_torch_compiles_halves_by_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an untested torch no function of Inductor is replaced while it compiles."""
    from torch._inductor import compile_fx

    seen: list[Any] = []
    compile_inner = compile_fx.compile_fx_inner
    lowering = compile_fx.GraphLowering

    def compiling(*args: Any, **given: Any) -> Any:
        seen.append(compile_fx.GraphLowering)
        return compile_inner(*args, **given)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compiling)
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.randn(4, 8)
    for version, is_own in ((torch.__version__, False), ("99.1.0", True)):
        torch._dynamo.reset()
        seen.clear()
        with monkeypatch.context() as patch, warnings.catch_warnings():
            patch.setattr(torch, "__version__", version)
            warnings.simplefilter("ignore")
            torch.compile(model, backend=fxckpt.Backend())(x).sum().backward()
        assert len(seen) == 2 and all((found is lowering) is is_own for found in seen)
