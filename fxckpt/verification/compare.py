"""Comparison of two observed steps: outputs, gradients, buffers, numbers and generators.

Two tensors are equal within rounding where ``|a - b| <= tolerance * max(|b|, scale)``, in the
2-norm. The scale of a gradient is a share of the mean gradient: one that is zero but for rounding
is not compared with itself. What the plain step itself gives differently from run to run (atomic
adds) is no difference either.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fxckpt.verification.observation import Observation
from fxckpt.verification.verdict import Finding

TOLERANCES = {torch.float64: 1e-9, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Relative differences that are rounding, by type; of others ``TOLERANCE``."""
TOLERANCE = 1e-4
"""Relative difference that is rounding in float32."""
LEAST_SHARE = 0.05
"""Gradients below this share of the mean one are compared with that share."""
NOISE_FACTOR = 10
"""How much more than the plain step from itself another step may differ."""

CAUSE_ABOVE = "If a finding above names a cause, mend that first."
PLAIN = "Both steps must run the same model on the same inputs. " + CAUSE_ABOVE


def compare_steps(
    reference: Observation, again: Observation, seen: Observation, tolerance: float | None
) -> tuple[list[Finding], list[str]]:
    """Return the differences of a step from the reference's, and a sentence on each comparison.

    ``again`` is the reference's step a second time.
    """
    findings: list[Finding] = []
    checks: list[str] = []
    for found, check in (
        _outputs(reference, again, seen, tolerance),
        _gradients(reference, again, seen, tolerance),
        _statistics(reference, again, seen, tolerance),
        (_numbers(reference, seen), ""),
        (_generators(reference, seen), f"generators: {', '.join(seen.generators)}"),
    ):
        findings += found
        checks += [check] if check else []
    return findings, checks


class _Tally:
    """Counts of tensors that are equal bitwise, equal within rounding, and not equal."""

    def __init__(self, tolerance: float | None) -> None:
        self.tolerance = tolerance
        self.bitwise = self.rounded = self.differing = 0

    def difference(self, a: Tensor, b: Tensor, noise: Tensor | None, scale: float = 0.0) -> float:
        """Return the relative difference of two tensors; 0 if they are equal within rounding."""
        if same_bits(a, b):
            self.bitwise += 1
            return 0.0
        found = relative(a, b, scale)
        own = 0.0 if noise is None else relative(noise, b, scale)
        allowed = TOLERANCES.get(b.dtype, TOLERANCE) if self.tolerance is None else self.tolerance
        if found <= max(allowed if b.is_floating_point() else 0.0, NOISE_FACTOR * own):
            self.rounded += 1
            return 0.0
        self.differing += 1
        return found

    def text(self, noun: str) -> str:
        """Return the counts in words."""
        counts = (
            (self.bitwise, "equal bitwise"),
            (self.rounded, "equal within rounding"),
            (self.differing, "not equal"),
        )
        shown = ", ".join(f"{count} {how}" for count, how in counts if count)
        return f"{noun}: {shown}" if shown else ""


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, NaN where the other is NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())


def relative(a: Tensor, b: Tensor, scale: float = 0.0) -> float:
    """Return the norm of a difference as a share of ``b``'s norm, or of ``scale`` if larger.

    Of whole numbers and booleans it is the share that differs.

    >>> relative(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    0.1
    """
    if a.shape != b.shape:
        return float("inf")
    if not (b.is_floating_point() or b.is_complex()):
        return float((a != b).double().mean())
    wide = torch.complex128 if b.is_complex() else torch.float64
    first, second = a.to(wide), b.to(wide)
    apart = float(torch.linalg.vector_norm(first - second))
    size = max(float(torch.linalg.vector_norm(second)), scale)
    if apart != apart or size == 0:  # NaN in one alone, or a reference of zeros
        return float("inf")
    return apart / size


def _percent(share: float) -> str:
    return "beyond measure" if share == float("inf") else f"by {100 * share:.2g} %"


def _outputs(
    reference: Observation, again: Observation, seen: Observation, tolerance: float | None
) -> tuple[list[Finding], str]:
    tally, findings = _Tally(tolerance), []
    for name, expected in reference.outputs.items():
        if name not in seen.outputs:
            continue
        off = tally.difference(seen.outputs[name], expected, again.outputs.get(name))
        if off:
            findings.append(
                Finding("output", name, f"the forward differs {_percent(off)}", PLAIN, off)
            )
    return findings, tally.text("outputs")


def _gradients(
    reference: Observation, again: Observation, seen: Observation, tolerance: float | None
) -> tuple[list[Finding], str]:
    """Return the gradients that differ, the most first, and a line about all of them."""
    tally, findings = _Tally(tolerance), []
    known = [g for g in reference.gradients.values() if g is not None]
    mean = _root_mean_square(known)
    for name, expected in reference.gradients.items():
        got = seen.gradients.get(name)
        if expected is None and got is None:
            continue
        if expected is None or got is None:
            tally.differing += 1
            findings.append(_missing(name, got is None))
            continue
        scale = LEAST_SHARE * mean * expected.numel() ** 0.5
        off = tally.difference(got, expected, again.gradients.get(name), scale)
        if off:
            text = f"the gradient differs {_percent(off)} of its norm"
            findings.append(Finding("gradient", name, text, CAUSE_ABOVE, off))
    findings.sort(key=lambda finding: -finding.size)
    return findings, tally.text("gradients")


def _root_mean_square(tensors: list[Tensor]) -> float:
    count = sum(t.numel() for t in tensors)
    squares = sum(float(torch.linalg.vector_norm(t.double())) ** 2 for t in tensors if t.numel())
    return (squares / count) ** 0.5 if count else 0.0


def _missing(name: str, is_missing: bool) -> Finding:
    if not is_missing:
        text = "has a gradient, and none in the reference"
        return Finding("gradient", name, text, "Do both steps train the same parameters?", 1.0)
    return Finding(
        "gradient",
        name,
        "has no gradient",
        "A reentrant region passes none on if no input of it requires one: pass "
        "use_reentrant=False, or call model.enable_input_require_grads().",
        float("inf"),
    )


def _statistics(
    reference: Observation, again: Observation, seen: Observation, tolerance: float | None
) -> tuple[list[Finding], str]:
    """Return the buffers that differ after the step, and a line about all of them."""
    tally, findings = _Tally(tolerance), []
    for name, expected in reference.buffers.items():
        if name not in seen.buffers:
            continue
        got = seen.buffers[name]
        off = tally.difference(got, expected, again.buffers.get(name))
        if not off:
            continue
        rewritten = name in seen.forward_buffers and not same_bits(seen.forward_buffers[name], got)
        if rewritten and _is_count(got):
            text = f"{_value(got)} after the step, {_value(expected)} in the reference"
        else:
            text = f"differs {_percent(off)} after the step"
        if rewritten:
            text += ": the backward wrote it again"
        findings.append(
            Finding(
                "statistics",
                name,
                text,
                "Recomputing a module must not update its buffers: leave it out of the region, or "
                "freeze the update while it recomputes. fxckpt.checkpoint updates them once.",
                off,
            )
        )
    return findings, tally.text("buffers")


def _is_count(tensor: Tensor) -> bool:
    return tensor.numel() == 1 and not tensor.is_floating_point()


def _value(tensor: Tensor) -> str:
    return str(tensor.item())


def _numbers(reference: Observation, seen: Observation) -> list[Finding]:
    # A switch that differs from the start is not the step's doing.
    return [
        Finding(
            "state",
            name,
            f"{seen.numbers[name]} after the step, {expected} in the reference",
            "The recompute runs the module's Python code again: count outside of the region.",
            abs(seen.numbers[name] - expected),
        )
        for name, expected in reference.numbers.items()
        if name in seen.numbers
        and seen.numbers[name] != expected
        and not isinstance(expected, bool)
    ]


def _generators(reference: Observation, seen: Observation) -> list[Finding]:
    """Return the generators that moved in the backward, and not in the reference's."""

    def moved(step: Observation, name: str) -> bool:
        after: Mapping[str, Tensor] = step.forward_generators
        return name in after and not torch.equal(after[name], step.generators[name])

    return [
        Finding(
            "random",
            f"generator of {name}",
            "stands elsewhere after the step: the backward drew numbers, so the next step draws "
            "others than the reference's",
            "Recompute with the generator's state saved and given back: preserve_rng_state=True.",
            1.0,
        )
        for name in seen.generators
        if moved(seen, name) and not moved(reference, name)
    ]
