"""Verification: each kind of fault is found where it was planted, and right steps pass."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fxckpt
from fxckpt.verification.verdict import Finding, Verdict
from tests.verification.families import FAMILIES, Family

FAST = ("gpt2", "mixtral", "whisper")


class Net(nn.Module):
    """A body that may be a checkpointed region, and a head."""

    def __init__(self, body: nn.Module, **options: Any) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(16, 4)
        self.is_on, self.options = True, {"use_reentrant": False, **options}

    def run_body(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, **self.options) if self.is_on else self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run_body(x)).square().mean()


def verdict_of(net: Net, x: Tensor | None = None) -> Verdict:
    """Return the verdict on a net against its copy without checkpointing."""
    plain = copy.deepcopy(net)
    plain.is_on = False
    return fxckpt.verify(net, plain, torch.randn(64, 16) if x is None else x)


def first(verdict: Verdict, kind: Any) -> Finding:
    return verdict.of_kind(kind)[0]


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 16))


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_torch_checkpointing_with_dropout_passes(use_reentrant: bool) -> None:
    """A region that keeps its generator's state gives no finding, and equal bits."""
    x = torch.randn(64, 16, requires_grad=True)
    verdict = verdict_of(Net(dropout(), use_reentrant=use_reentrant), x)
    assert verdict.ok, verdict
    assert "gradients: 7 equal bitwise" in str(verdict)


def test_masks_drawn_anew_are_found() -> None:
    """The random op is named by its module, the gradients by their parameter."""
    verdict = verdict_of(Net(dropout(), preserve_rng_state=False))
    assert first(verdict, "random").where == "body.1"
    assert {f.where for f in verdict.of_kind("gradient")} >= {"body.0.weight", "body.0.bias"}
    assert "generator of cpu" in [f.where for f in verdict.of_kind("random")]


def test_statistics_updated_twice_are_found() -> None:
    """A BatchNorm in a region of torch's counts its batch twice, and nothing else is wrong."""
    verdict = verdict_of(Net(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())))
    assert {f.kind for f in verdict.findings} == {"statistics"}
    counted = [f for f in verdict.findings if f.where == "body.1.num_batches_tracked"]
    assert counted[0].text.startswith("2 after the step, 1 in the reference")


class Counting(nn.Module):
    """Counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(16, 16), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).relu()


def test_calls_counted_twice_are_found() -> None:
    """A counter in Python that the recompute moves is named."""
    net = Net(Counting())
    verdict = verdict_of(net)
    assert [(f.kind, f.where) for f in verdict.findings] == [("state", "body.calls")]
    assert net.body.calls == 0


def test_settings_that_differ_are_no_finding() -> None:
    """Of the numbers that modules keep, what the step adds is compared."""
    net = Net(Counting())
    plain = copy.deepcopy(net)
    plain.is_on, plain.body.calls = False, 7
    net.every, plain.every = 2, 0.5  # type: ignore[assignment]
    verdict = fxckpt.verify(net, plain, torch.randn(64, 16))
    (found,) = verdict.findings
    assert found.where == "body.calls"
    assert found.text == "2 after the step from 0, 8 in the reference from 7"
    net.is_on = False
    assert fxckpt.verify(net, plain, torch.randn(64, 16)).ok


def test_numbers_that_never_repeat_are_no_finding() -> None:
    """A number that each run of the plain step leaves at another value tells nothing."""
    runs = itertools.count()

    class Timed(Net):
        time = 0.0

        def forward(self, x: Tensor) -> Tensor:
            self.time = next(runs) ** 2
            return super().forward(x)

    net = Timed(dropout())
    net.time = 0.0
    assert verdict_of(net).ok


class Drifting(nn.Module):
    """Gives something else in each run, by a share."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.linear, self.share, self.runs = nn.Linear(16, 16), share, itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() * (1 + self.share * next(self.runs))


def drift(share: float, is_checkpointed: bool) -> Verdict:
    body = Drifting(share)

    def step(x: Tensor) -> Tensor:
        return checkpoint(body, x, use_reentrant=False) if is_checkpointed else body(x)

    return fxckpt.verify(step, body, torch.randn(64, 16))


@pytest.mark.parametrize("is_checkpointed", (False, True))
def test_a_reference_that_differs_is_told(is_checkpointed: bool) -> None:
    """Where two runs of the plain step differ, a comparison with it is void."""
    verdict = drift(0.5, is_checkpointed)
    assert {f.where for f in verdict.of_kind("reference")} == {
        "result",
        "linear.weight",
        "linear.bias",
    }
    found = first(verdict, "reference")
    assert found.text == f"two runs of the plain step differ by {100 * found.size:.2g} % here"
    assert "within rounding" not in str(verdict)
    assert "outputs: 1 as far apart as two runs of the plain step (result by" in str(verdict)
    assert "differs from run to run, which voids the comparison" in str(verdict)


@pytest.mark.parametrize(
    ("share", "text"),
    ((1e-6, "within rounding"), (2e-4, "as far apart as two runs of the plain step")),
)
def test_last_bits_that_differ_pass(share: float, text: str) -> None:
    """Ops that are not repeatable, as atomic adds, void nothing."""
    verdict = drift(share, is_checkpointed=True)
    assert verdict.ok, verdict
    assert text in str(verdict)


class Experts(nn.Module):
    """A router with noise, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        weights, chosen = (scores + torch.randn_like(scores)).softmax(-1).topk(2)
        return torch.einsum("td,tkde,tk->te", x, self.experts[chosen], weights)


def test_router_flips_are_found() -> None:
    """The op that chose otherwise is named, with the number of its choices."""
    verdict = verdict_of(Net(Experts(), preserve_rng_state=False))
    found = first(verdict, "routing")
    assert found.where == "body" and "of 128 choices of aten.topk" in found.text
    assert 0 < found.size < 1
    assert verdict_of(Net(Experts())).ok


class Scaled(nn.Module):
    """Multiplies by a buffer, inside of a function of the buffer's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * (self.scale + 0)).tanh()


class Writing(Net):
    """Writes what the region reads, after the region."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.run_body(x)
        self.body.scale.data.mul_(0.5)
        return self.head(hidden).square().mean()


def test_writes_before_the_recompute_are_found() -> None:
    """The tensor is named, and the line that wrote it."""
    verdict = verdict_of(Writing(Scaled()))
    found = first(verdict, "write")
    assert found.where == "body.scale" and "aten.mul_" in found.text
    assert __file__ in found.text
    assert verdict.of_kind("gradient")


class Normed(nn.Module):
    """Divides what it chose in place: a tensor that it makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        weights, _ = self.linear(x).softmax(-1).topk(16)
        weights /= weights.sum(-1, keepdim=True)
        return weights


class Scaling(torch.autograd.Function):
    """Runs a module without a graph, again in the backward, and gives 1.05 of its gradients."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.module, ctx.x = module, x
        return module(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            result = ctx.module(ctx.x)
        found = torch.autograd.grad(result, tuple(ctx.module.parameters()), gradients)
        return None, None, *(1.05 * gradient for gradient in found)


def test_writes_of_the_region_are_no_cause() -> None:
    """A region may write to what it makes, whatever else is wrong with its gradients."""
    body = Normed()

    def wrong(x: Tensor) -> Tensor:
        return Scaling.apply(body, x.clone(), *body.parameters())

    verdict = fxckpt.verify(wrong, body, torch.randn(64, 16))
    assert {f.kind for f in verdict.findings} == {"gradient"}, verdict


class Depth(nn.Module):
    """Leaves its layer out at random, by Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) if random.random() < 0.5 else x * 1.5


@pytest.mark.parametrize("check", ("default", "none"))
def test_random_paths_of_python_are_found(check: str) -> None:
    """The region ran another path, over inputs that nobody wrote to."""
    blocks = nn.ModuleList(Depth() for _ in range(8))

    def step(x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False, determinism_check=check)
        return x

    def plain(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x

    verdict = fxckpt.verify(step, plain, torch.randn(64, 16))
    assert not verdict.of_kind("write"), verdict
    assert "on other values than the forward" in first(verdict, "recompute").text


def write_data(weight: Tensor, _: Tensor) -> None:
    weight.data.mul_(1.3)


def set_data(weight: Tensor, _: Tensor) -> None:
    weight.data = weight.data * 1.3


def write_in_backward(weight: Tensor, hidden: Tensor) -> None:
    hidden.register_hook(lambda _: write_data(weight, hidden))


@pytest.mark.parametrize("write", (write_data, set_data, write_in_backward))
@pytest.mark.parametrize("key", ("weight", "bias"))
def test_changed_parameters_are_found(write: Callable[..., None], key: str) -> None:
    """A parameter is named also where the recompute reads a view of it, as of a weight."""

    class Changing(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.run_body(x)
            write(getattr(self.body[0], key), hidden)
            return self.head(hidden).square().mean()

    verdict = verdict_of(Changing(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))))
    assert [f.where for f in verdict.of_kind("write")] == [f"body.0.{key}"], verdict
    told = first(verdict, "write").text.partition("; last written by ")[2]
    assert told.startswith("aten.mul_ at" if write is not set_data else "")


def test_later_steps_that_raise_are_found() -> None:
    """An error of the third step alone is a finding, though no two first steps differ."""

    class Third(Net):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += self.is_on
            if self.is_on and type(self).calls == 3:
                raise RuntimeError("the third call")
            return super().forward(x)

    verdict = verdict_of(Third(nn.Linear(16, 16)))
    (finding,) = verdict.of_kind("error")
    assert "the third call" in finding.text and finding.where == "the checkpointed step"
    assert any("not measured" in check for check in verdict.checks)


def test_in_place_writes_that_raise_are_found() -> None:
    """A step that autograd refuses is a finding, and not an error of the check."""

    class Refused(Net):
        def forward(self, x: Tensor) -> Tensor:
            inside = x.sin()
            hidden = self.body(inside)
            if self.is_on:
                inside.mul_(2)
            return self.head(hidden).square().mean()

    verdict = verdict_of(Refused(nn.Linear(16, 16)))
    assert first(verdict, "write").where == "the checkpointed step"


class Flagged(nn.Module):
    """Takes one path or the other, by a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.flags = nn.Linear(16, 16), {"first": True}

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y if self.flags["first"] else y.exp2().detach()).tanh()


def test_other_ops_in_the_recompute_are_found() -> None:
    """A flag that changed between the two runs takes another path through the region."""

    class Switching(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.body.flags["first"] = True
            hidden = self.run_body(x)
            self.body.flags["first"] = False
            return self.head(hidden).square().mean()

    verdict = verdict_of(Switching(Flagged()))
    assert first(verdict, "recompute").text.startswith("the recompute runs aten.exp2()")


class Keeping(Net):
    """Keeps what its steps gave."""

    most: int

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.run_body(x)
        if self.is_on:
            self.kept = [*getattr(self, "kept", []), hidden][-self.most :]
        return self.head(hidden).square().mean()


@pytest.mark.parametrize(("most", "text"), ((1, "stay in use"), (100, "grows by 4.0 KiB")))
def test_kept_tensors_are_found(most: int, text: str) -> None:
    """The attribute that holds them is named, growing or not."""
    net = Keeping(dropout())
    net.most = most
    found = first(verdict_of(net), "leak")
    assert found.where == "kept" and text in found.text
    assert found.size == 4096


def test_backwards_that_raised_are_no_leak() -> None:
    """What a backward that raised left behind is freed, and counts as nobody's."""

    class Raising(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.run_body(x)
            self.head.weight.register_hook(lambda _: 1 / 0)
            return self.head(hidden).square().mean()

    right = Net(nn.Linear(16, 16))
    for failing in (lambda: verdict_of(Raising(dropout())), lambda: fail(Raising(dropout()))):
        failing()
        verdict = verdict_of(right, torch.randn(4, 16))
        assert verdict.ok, verdict


def fail(net: Net) -> None:
    with pytest.raises(ZeroDivisionError):
        net(torch.randn(64, 16)).backward()


def test_memory_in_cycles_is_found() -> None:
    """Tensors that wait for the garbage collector are a finding of their own."""

    class Circle(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.run_body(x)
            if self.is_on:
                circle: list[Any] = [hidden.detach().clone()]
                circle.append(circle)
            return self.head(hidden).square().mean()

    assert "garbage collector" in first(verdict_of(Circle(dropout())), "leak").text


def test_missing_gradients_are_found() -> None:
    """A reentrant region whose inputs need no gradient gives its parameters none."""
    linear = nn.Linear(16, 16)

    def step(x: Tensor) -> Tensor:
        # torch warns of it, once.
        with pytest.warns(UserWarning) if torch.is_grad_enabled() else contextmanager(iter)():
            return checkpoint(linear, x, use_reentrant=True)

    verdict = fxckpt.verify(step, linear, torch.randn(8, 16))
    assert {f.where for f in verdict.of_kind("gradient")} == {"weight", "bias"}


@contextmanager
def lossy_offload() -> Iterator[None]:
    """Save tensors for the backward in half precision."""
    with saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        yield


@pytest.mark.parametrize(("hooks", "is_right"), ((save_on_cpu, True), (lossy_offload, False)))
def test_offload_is_checked(hooks: Callable[[], Any], is_right: bool) -> None:
    """An offload that gives back other values has other gradients."""
    body = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def step(x: Tensor) -> Tensor:
        with hooks():
            return body(x)

    verdict = fxckpt.verify(step, body, torch.randn(64, 16))
    assert verdict.ok == is_right, verdict
    assert is_right or {f.kind for f in verdict.findings} == {"gradient"}


def test_own_checkpointing_passes() -> None:
    """fxckpt's regions and plans give no finding, with dropout and statistics."""
    body = nn.Sequential(*dropout(), nn.BatchNorm1d(16))
    net = Net(body)
    regions = fxckpt.verify(lambda x: fxckpt.checkpoint(body, x), body, torch.randn(64, 16))
    assert regions.ok, regions
    backend = fxckpt.Backend(policy=fxckpt.policies.recompute_all, inner="aot_eager")
    net.is_on = False
    plan = fxckpt.verify(
        torch.compile(copy.deepcopy(net), backend=backend), net, torch.randn(64, 16)
    )
    assert plan.ok, plan


def test_everything_is_as_before() -> None:
    """Parameters, buffers, gradients and generators are given back, also after an error."""
    net = Net(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)))
    gradient = net.head.weight.grad = torch.ones(4, 16)
    state, generator = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    for x in (torch.randn(64, 16), torch.randn(64, 3)):
        torch.set_rng_state(generator)
        verdict_of(net, x)
        assert torch.equal(torch.get_rng_state(), generator)
        assert all(
            torch.equal(a, b)
            for a, b in zip(net.state_dict().values(), state.values(), strict=True)
        )
        assert net.head.weight.grad is gradient and net.body[0].weight.grad is None


def test_other_models_are_refused() -> None:
    """Another model, no reference and a meta model are errors that say what to give."""
    x = torch.randn(4, 16)
    with pytest.raises(fxckpt.InvalidOption, match="is missing in the checkpointed step"):
        fxckpt.verify(nn.Tanh(), nn.Linear(16, 16), x)
    with pytest.raises(fxckpt.InvalidOption, match="without a reference"):
        fxckpt.verify(nn.Linear(16, 16))
    with pytest.raises(fxckpt.InvalidOption, match="takes the reference after"):
        fxckpt.verify(nn.Linear(16, 16), x)  # type: ignore[arg-type]
    with pytest.raises(fxckpt.InvalidOption, match="on the meta device"):
        meta = nn.Linear(16, 16, device="meta")
        fxckpt.verify(meta, meta, x)
    with pytest.raises(fxckpt.InvalidOption, match="3 or more"):
        fxckpt.verify(nn.Tanh(), nn.Tanh(), x, steps=1)


def test_a_verdict_reads_well() -> None:
    """Findings of one kind share their advice, and many are counted."""
    found = [Finding("gradient", f"{i}.weight", "differs", "Do this.", 0.5) for i in range(7)]
    verdict = Verdict(tuple(found), ("outputs: 1 equal bitwise",), 1024, 2048)
    assert str(verdict).splitlines() == [
        "7 findings: the step is not that of the reference",
        "  gradient    0.weight: differs",
        "                Do this.",
        *(f"  gradient    {i}.weight: differs" for i in range(1, 5)),
        "  gradient    ... and 2 more",
        "  checked: outputs: 1 equal bitwise",
        "  peak: 1.0 KiB, 0.50 of the reference's 2.0 KiB",
    ]
    assert verdict.table().records()[0]["where"] == "0.weight"


def assert_passes(family: Family) -> None:
    model, inputs = family.make()
    verdict = fxckpt.verify(model, **inputs)
    assert verdict.ok, verdict
    assert any("recomputed" in check for check in verdict.checks)


TRANSFORMERS_WARNINGS = pytest.mark.filterwarnings("ignore::UserWarning")


@TRANSFORMERS_WARNINGS
@pytest.mark.parametrize("name", FAST)
def test_transformers_models_pass(name: str) -> None:
    """No false alarm on models whose checkpointing is right."""
    assert_passes(next(family for family in FAMILIES if family.name == name))


@TRANSFORMERS_WARNINGS
@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_passes(family: Family) -> None:
    """No false alarm on any of the families."""
    assert_passes(family)
