"""``fxckpt.verify``: anybody's checkpointing or offload against the plain step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from fxckpt.errors import InvalidOption
from fxckpt.memory_meter import Meter, meter_of
from fxckpt.verification.causes import WRITTEN, causes
from fxckpt.verification.compare import compare_steps
from fxckpt.verification.growth import (
    Usage,
    collecting_new_objects,
    drop_failed_backward,
    leaks,
    measure,
)
from fxckpt.verification.observation import (
    Loss,
    StepRun,
    named_tensors,
    observe,
)
from fxckpt.verification.op_log import OpLog, OpRecorder
from fxckpt.verification.random_state import keeping_generators
from fxckpt.verification.side import Arguments, CheckedStep, without_checkpointing
from fxckpt.verification.verdict import Finding, Verdict

LEAST_STEPS = 3
"""Steps that growth needs: one that fills caches, and two to compare."""


def verify(
    checkpointed: Callable[..., Any],
    reference: Callable[..., Any] | None = None,
    *args: Any,
    loss: Loss | None = None,
    tolerance: float | None = None,
    steps: int = 4,
    **kwargs: Any,
) -> Verdict:
    """Compare a checkpointed or offloaded step with the same step without.

    The checkpointing may be anybody's: torch's, a trainer's, fxckpt's, or hooks that offload. Both
    steps start from the parameters and buffers of ``checkpointed`` and from the same seed. Compared
    are outputs, gradients, buffers, numbers that modules keep in Python, and generators; the ops of
    the recompute, one by one, with those of the forward; and the memory that several steps leave.
    Parameters, buffers, gradients and generators are as before at the end.

    Parameters
    ----------
    checkpointed
        The model with checkpointing on, or a function that runs its forward.
    reference
        The same model without. By default a copy of ``checkpointed`` after its own
        ``gradient_checkpointing_disable()``, which models of transformers and diffusers have.
    *args, **kwargs
        Arguments of both. Each run gets its own copies of the tensors.
    loss
        A function of the step's result that returns a scalar. By default the result's own ``loss``,
        or else random incoming gradients for all outputs.
    tolerance
        Relative difference that counts as rounding, 0 for bitwise equality. By default 1e-4 in
        float32, 1e-9 in float64, 1e-2 in float16, 5e-2 in bfloat16.
    steps
        Number of steps, 3 or more, for the memory.

    Returns
    -------
    Verdict
        Its ``ok`` is True if nothing was found; ``findings`` lists the differences, causes first.

    Raises
    ------
    InvalidOption
        The two are not the same model, there is no reference, or a model is on the meta device.

    Examples
    --------
    >>> import torch, fxckpt
    >>> from torch import nn
    >>> from torch.utils.checkpoint import checkpoint
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    >>> def wrong(x):
    ...     return checkpoint(model, x, use_reentrant=False, preserve_rng_state=False)
    >>> verdict = fxckpt.verify(wrong, model, torch.randn(4, 8))
    >>> verdict.ok, sorted({finding.kind for finding in verdict.findings})
    (False, ['gradient', 'random'])
    """
    if steps < LEAST_STEPS:
        raise InvalidOption(f"steps={steps} was asked for. Growth needs {LEAST_STEPS} or more.")
    if reference is not None and not callable(reference):
        raise InvalidOption(
            f"verify() takes the reference after the checkpointed step, and was given "
            f"{type(reference).__name__}. Example: fxckpt.verify(checkpointed, plain, x)."
        )
    plain = without_checkpointing(checkpointed) if reference is None else reference
    sides = CheckedStep(checkpointed, "checkpointed"), CheckedStep(plain, "reference")
    with keeping_generators():
        try:
            return _verdict(*sides, StepRun(Arguments(args, kwargs), loss), tolerance, steps)
        finally:
            for side in reversed(sides):
                side.restore()
                drop_failed_backward(side.device())


def _verdict(
    checkpointed: CheckedStep,
    reference: CheckedStep,
    run: StepRun,
    tolerance: float | None,
    steps: int,
) -> Verdict:
    """Run both steps, and return the findings about the checkpointed one."""
    reference.start_like(checkpointed)
    # The first steps of all: caches that they fill are full from then on.
    usage = _usage(checkpointed, reference, run, steps)
    run = dataclasses.replace(run, outputs=_common_outputs(checkpointed, reference, run))
    expected, again = observe(reference, run), observe(reference, run)
    seen = observe(checkpointed, run)
    if (error := expected.error or again.error) is not None:
        return Verdict((_raised(error, reference.label),), (), None, None)
    log = _log(checkpointed, run)
    if seen.error is not None:
        raised = _raised(seen.error, checkpointed.label)
        return Verdict((*causes(log), raised), (), None, None)
    found, checks = compare_steps(expected, again, seen, tolerance)
    checks.append(_recomputed(log, checkpointed))
    found = [*_explaining(causes(log), found), *found]
    # Where the reference does not repeat itself, that is to be mended first.
    found.sort(key=lambda finding: finding.kind != "reference")
    if isinstance(usage, Finding):  # A first step went well, and a later one did not.
        checks.append("memory: not measured, as one of several steps raised an error")
        return Verdict((usage, *found), tuple(checks), None, None)
    if usage is None:
        checks.append("memory: this device has no meter")
        return Verdict(tuple(found), tuple(checks), None, None)
    checks.append(f"memory after {steps} steps")
    peaks = (each.peak_bytes for each in usage)
    return Verdict((*found, *leaks(*usage)), tuple(checks), *peaks)


def _explaining(caused: list[Finding], found: list[Finding]) -> list[Finding]:
    """Return the causes that explain what was found.

    A recompute may read a changed tensor to no effect, as to keep a copy of it; and a buffer that
    was written twice is reported as that.
    """
    twice = {finding.where for finding in found if finding.kind == "statistics"}
    is_wrong = any(finding.kind == "gradient" for finding in found)
    return [
        cause
        for cause in caused
        if cause.kind in ("random", "routing")
        or (is_wrong and not (cause.kind == "write" and cause.where in twice))
    ]


def _common_outputs(
    checkpointed: CheckedStep, reference: CheckedStep, run: StepRun
) -> frozenset[str]:
    """Return the names of the outputs that both steps have: a cache may be off in one."""
    names = []
    for side in (reference, checkpointed):
        try:
            names.append(frozenset(named_tensors(run.forward(side)[0])))
        except Exception:
            # The observed step raises it again, and that is reported.
            return frozenset()
    return names[0] & names[1]


def _raised(error: Exception, label: str) -> Finding:
    first = str(error).strip().split("\n")[0]
    text = f"{type(error).__name__}: {first}"
    where = f"the {label} step"
    if "modified by an inplace operation" in first:
        return Finding("write", where, text, WRITTEN, 1.0)
    if label == "reference":
        advice = "The plain step must run: what it raises, checkpointing may hide."
    elif isinstance(error, CheckpointError):
        advice = "The region is not the same the second time: its shapes, its ops or its inputs."
    else:
        advice = "The reference runs with the same arguments, and this step must, too."
    return Finding("error", where, text, advice, 1.0)


def _log(side: CheckedStep, run: StepRun) -> OpLog:
    """Return the ops of a step."""
    names = {id(module): name for name, module in side.named_modules()}
    inputs: dict[str, Tensor] = {}
    recorder = OpRecorder(names, lambda: {**inputs, **side.tensors()})
    # An error was observed before; the ops until then are of use.
    with suppress(Exception), ExitStack() as recording:

        def start(arguments: Mapping[str, Tensor]) -> None:
            inputs.update(arguments)
            recording.enter_context(recorder.recording())

        result, _ = run.forward(side, start)
        run.backward(result, recorder.start_backward)
    return recorder.log


def _recomputed(log: OpLog, side: CheckedStep) -> str:
    if log.recompute:
        return f"ops: {len(log.recompute)} recomputed, next to {len(log.forward)} of the forward"
    if any(is_compiled(module) for module in side.modules.values()):
        return "ops: compiled code shows none of its own, so causes are not looked for"
    return "ops: nothing was recomputed (is checkpointing on, and the model in train mode?)"


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` compiled a module or a part of it."""
    return hasattr(module, "_orig_mod") or any(
        part._compiled_call_impl is not None for part in module.modules()
    )


def _usage(
    checkpointed: CheckedStep, reference: CheckedStep, run: StepRun, steps: int
) -> tuple[Usage, Usage] | Finding | None:
    """Return the memory that several steps of both leave in use, or an error of one of them.

    None for a device whose memory cannot be measured.
    """
    device = checkpointed.device()
    if device.type not in ("cpu", "cuda", "xpu"):
        return None
    meter: Meter = meter_of(device)
    found = []
    with collecting_new_objects():
        for side in (reference, checkpointed):
            try:
                found.append(measure(side, run, meter, steps))
            except Exception as error:
                side.reset()
                return _raised(error, side.label)
    return found[1], found[0]
