"""Comparison of two observed steps: outputs, gradients, buffers, numbers and generators.

Two tensors are equal within rounding where ``|a - b| <= tolerance * max(|b|, scale)``, in the
2-norm. The scale of a gradient is a share of the mean gradient: one that is zero but for rounding
is not compared with itself. What the plain step itself gives differently from run to run (atomic
adds) is no difference either; where that is far more than rounding, the comparison is void, which
is a finding of its own.
"""

from __future__ import annotations

import math
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
MOST_NOISE = 0.1
"""Difference of the plain step from itself that voids a comparison in every type."""

CAUSE_ABOVE = "If a finding above names a cause, mend that first."
REPEAT = (
    "Let the plain step give the same each time, or no step can be compared with it: draw random "
    "numbers from the default generators, which verify() seeds, keep no state from step to step, "
    "or call torch.use_deterministic_algorithms(True)."
)
PLAIN = "Both steps must run the same model on the same inputs. " + CAUSE_ABOVE


def compare_steps(
    reference: Observation, again: Observation, seen: Observation, tolerance: float | None
) -> tuple[list[Finding], list[str]]:
    """Return the differences of a step from the reference's, and a sentence on each comparison.

    ``again`` is the reference's step a second time. Where it differs much, that comes first.
    """
    found: list[Finding] = []
    checks: list[str] = []
    steps = reference, again, seen
    tallies = (
        _Tally("outputs", steps, reference.outputs, tolerance),
        _Tally("gradients", steps, reference.gradients, tolerance),
        _Tally("buffers", steps, reference.buffers, tolerance),
    )
    for tally, compare in zip(tallies, (_outputs, _gradients, _statistics), strict=True):
        found += compare(tally)
        checks += [text] if (text := tally.text()) else []
    found += _numbers(*steps, tolerance)
    found += _generators(reference, seen)
    checks.append(f"generators: {', '.join(seen.generators)}")
    return [*(finding for tally in tallies for finding in tally.void), *found], checks


class _Tally:
    """Counts of tensors that are equal bitwise, equal within rounding, and not equal.

    Parameters
    ----------
    noun
        What the tensors are: ``gradients``.
    steps
        The reference's step, the same a second time, and the step that is compared.
    expected
        The reference's tensors, by name.
    tolerance
        Relative difference that is rounding; None for that of the type.
    """

    def __init__(
        self,
        noun: str,
        steps: tuple[Observation, Observation, Observation],
        expected: Mapping[str, Tensor | None],
        tolerance: float | None,
    ) -> None:
        self.noun, self.tolerance = noun, tolerance
        self.reference, self.again, self.seen = steps
        self.bitwise = self.rounded = self.differing = 0
        self.noisy: dict[str, float] = {}
        self.void: list[Finding] = []
        self._mean = _root_mean_square([t for t in expected.values() if t is not None])

    def scale(self, tensor: Tensor) -> float:
        """Return the norm of a tensor that is a small share of the mean one."""
        return LEAST_SHARE * self._mean * float(tensor.numel() ** 0.5)

    def difference(
        self, name: str, a: Tensor, b: Tensor, noise: Tensor | None, scale: float = 0.0
    ) -> float:
        """Return the relative difference of two tensors; 0 if they are equal within rounding.

        ``noise`` is the second one in another run.
        """
        own = self._own_difference(name, b, noise, scale)
        if same_bits(a, b):
            self.bitwise += 1
            return 0.0
        found = relative(a, b, scale)
        if found <= self._allowed(b):
            self.rounded += 1
            return 0.0
        if found <= NOISE_FACTOR * own:
            if own <= _rounding(b):
                self.rounded += 1
            else:
                self.noisy[name] = own
            return 0.0
        self.differing += 1
        return found

    def _allowed(self, tensor: Tensor) -> float:
        if self.tolerance is None or not _has_fractions(tensor):
            return _rounding(tensor)
        return self.tolerance

    def _own_difference(
        self, name: str, expected: Tensor, noise: Tensor | None, scale: float
    ) -> float:
        """Return how far the plain step is from itself, and note where that is far."""
        if noise is None or same_bits(noise, expected):
            return 0.0
        # What is zero but for rounding is not compared with itself.
        own = relative(noise, expected, max(scale, self.scale(expected)))
        rounding = _rounding(expected)
        most = min(NOISE_FACTOR * rounding, MOST_NOISE) if rounding else MOST_NOISE
        if own > max(most, self.tolerance or 0.0):
            text = f"two runs of the plain step differ {_percent(own)} here"
            self.void.append(Finding("reference", name, text, REPEAT, own))
        return relative(noise, expected, scale)

    def text(self) -> str:
        """Return the counts in words."""
        counts = (
            (self.bitwise, "equal bitwise"),
            (self.rounded, "equal within rounding"),
            (len(self.noisy), f"as far apart as two runs of the plain step{self._noisiest()}"),
            (self.differing, "not equal"),
        )
        shown = ", ".join(f"{count} {how}" for count, how in counts if count)
        return f"{self.noun}: {shown}" if shown else ""

    def _noisiest(self) -> str:
        if not self.noisy:
            return ""
        name = max(self.noisy, key=lambda name: self.noisy[name])
        return f" ({name} {_percent(self.noisy[name])})"


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _rounding(tensor: Tensor) -> float:
    """Return the relative difference that is rounding in a tensor's type."""
    if not _has_fractions(tensor):
        return 0.0
    return TOLERANCES.get(tensor.dtype.to_real(), TOLERANCE)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, NaN where the other is NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())


def relative(a: Tensor, b: Tensor, scale: float = 0.0) -> float:
    """Return the norm of a difference as a share of ``b``'s norm, or of ``scale`` if larger.

    Of whole numbers and booleans it is the share that differs. NaN is equal to NaN.

    >>> relative(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    0.1
    """
    if a.shape != b.shape:
        return float("inf")
    if not _has_fractions(b):
        return float((a != b).double().mean())
    first, second = _wide(a), _wide(b)
    is_same = torch.isclose(first, second, rtol=0, atol=0, equal_nan=True)
    apart = float(torch.linalg.vector_norm((first - second).masked_fill(is_same, 0)))
    size = max(float(torch.linalg.vector_norm(second[second.isfinite()])), scale)
    if apart != apart or size == 0:  # NaN in one alone, or a reference of zeros
        return float("inf")
    return apart / size


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _percent(share: float) -> str:
    if share == float("inf"):
        return "beyond measure"
    return f"by {100 * share:.2g} %" if share < 1 else f"by {100 * share:.0f} %"


def _outputs(tally: _Tally) -> list[Finding]:
    findings = []
    seen, again = tally.seen.outputs, tally.again.outputs
    for name, expected in tally.reference.outputs.items():
        if name not in seen:
            continue
        off = tally.difference(name, seen[name], expected, again.get(name))
        if off:
            findings.append(
                Finding("output", name, f"the forward differs {_percent(off)}", PLAIN, off)
            )
    return findings


def _gradients(tally: _Tally) -> list[Finding]:
    """Return the gradients that differ, the most first."""
    findings = []
    for name, expected in tally.reference.gradients.items():
        got = tally.seen.gradients.get(name)
        if expected is None and got is None:
            continue
        if expected is None or got is None:
            tally.differing += 1
            findings.append(_missing(name, got is None))
            continue
        noise = tally.again.gradients.get(name)
        off = tally.difference(name, got, expected, noise, tally.scale(expected))
        if off:
            text = f"the gradient differs {_percent(off)} of its norm"
            findings.append(Finding("gradient", name, text, CAUSE_ABOVE, off))
    findings.sort(key=lambda finding: -finding.size)
    return findings


def _root_mean_square(tensors: list[Tensor]) -> float:
    finite = [wide[wide.isfinite()] for t in tensors if _has_fractions(t) for wide in (_wide(t),)]
    count = sum(t.numel() for t in finite)
    squares = sum(float(torch.linalg.vector_norm(t)) ** 2 for t in finite)
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


def _statistics(tally: _Tally) -> list[Finding]:
    """Return the buffers that differ after the step."""
    findings = []
    seen, again = tally.seen, tally.again
    for name, expected in tally.reference.buffers.items():
        if name not in seen.buffers:
            continue
        got = seen.buffers[name]
        off = tally.difference(name, got, expected, again.buffers.get(name))
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
    return findings


def _is_count(tensor: Tensor) -> bool:
    return tensor.numel() == 1 and not tensor.is_floating_point()


def _value(tensor: Tensor) -> str:
    return str(tensor.item())


def _numbers(
    reference: Observation, again: Observation, seen: Observation, tolerance: float | None
) -> list[Finding]:
    """Return the numbers that the two steps change differently.

    One that differs from the start, as a setting does, is not the step's doing, and one that the
    plain step itself leaves at another value in each run, as a time, cannot be compared.
    """
    allowed = TOLERANCE if tolerance is None else tolerance
    findings = []
    for name, expected in reference.numbers.items():
        got, repeated = seen.numbers.get(name), again.numbers.get(name)
        if got is None or repeated is None or isinstance(expected, bool):
            continue
        if not _is_near(repeated, expected, allowed) or _is_near(got, expected, allowed):
            continue
        start, own_start = reference.start_numbers[name], seen.start_numbers[name]
        if _is_near(_change(own_start, got), _change(start, expected), allowed):
            continue
        text = f"{got} after the step, {expected} in the reference"
        if start != own_start:
            text = (
                f"{got} after the step from {own_start}, {expected} in the reference from {start}"
            )
        findings.append(
            Finding(
                "state",
                name,
                text,
                "The recompute runs the module's Python code again: count outside of the region.",
                abs(got - expected),
            )
        )
    return findings


def _is_near(a: float, b: float, allowed: float) -> bool:
    """Return whether two numbers are equal; of fractions, within rounding."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return math.isclose(a, b, rel_tol=allowed) or (math.isnan(a) and math.isnan(b))


def _change(before: float, after: float) -> float:
    return 0 if _is_near(before, after, 0.0) else after - before


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
