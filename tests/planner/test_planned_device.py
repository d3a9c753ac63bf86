"""Plans for a device that is not here: its graph, its bytes, its rates."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxckpt
from fxckpt.costs.devices import REFERENCE
from fxckpt.errors import CaptureError, InvalidBudget, InvalidOption
from fxckpt.planner.capture import capture_joint
from fxckpt.planner.planned_device import planned_device

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU is traced on itself, see tests/gpu"
)


def layers(width: int, count: int = 4) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count)))


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def test_meta_model_is_priced_as_the_reference() -> None:
    """Without a device a meta model is planned for a stated GPU, not for this machine's CPU."""
    model, x = on_meta(lambda: layers(512)), torch.empty(256, 512, device="meta")
    plan, named = fxckpt.plan(model, x), fxckpt.plan(model, x, device=REFERENCE)
    assert plan.cost == f"roofline of {REFERENCE}, the reference for the meta device"
    assert named.cost == f"roofline of {REFERENCE}"
    assert (plan.step_seconds, plan.digest) == (named.step_seconds, named.digest)
    assert f"(cost model: {plan.cost})" in str(plan.explain())


def test_faster_device_takes_less_time() -> None:
    """The same step takes less time on a faster device, and the same bytes."""
    model, x = on_meta(lambda: layers(2048)), torch.empty(4096, 2048, device="meta")
    plans = [fxckpt.plan(model, x, device=name) for name in ("A100", "h100", "NVIDIA B200")]
    assert [p.cost[-4:] for p in plans] == ["A100", "H100", "B200"]
    seconds = [p.step_seconds for p in plans]
    assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) == 3
    assert len({p.peak_bytes for p in plans}) == 1


def test_cuda_autocast_without_cuda_is_told() -> None:
    """Without a GPU, torch switches it off: in a model it is an error, around one a warning."""
    model, x = on_meta(lambda: layers(64)), torch.empty(8, 64, device="meta")

    def loss(x: Tensor, kind: str, enabled: bool) -> Tensor:
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=enabled):
            return model(x).float().sum()

    for kind, enabled in (("cuda", False), ("cpu", True)):
        fxckpt.plan(loss, x, kind, enabled, device="H100")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "CUDA is not available")  # torch's own
        with pytest.raises(CaptureError, match=r"no CUDA device.*autocast\('cpu'"):
            fxckpt.plan(loss, x, "cuda", True, device="H100")
        around = torch.autocast("cuda", dtype=torch.bfloat16)
    with around, pytest.warns(UserWarning, match="around this call does nothing"):
        fxckpt.plan(model, x, device="H100")


@pytest.mark.parametrize("width", [512, 500])
def test_gpu_bytes_are_whole_blocks(width: int) -> None:
    """For a GPU each storage takes whole blocks of 512 bytes, for a CPU what it holds."""
    model, x = on_meta(lambda: layers(width)), torch.empty(33, width, device="meta")
    away, here = (fxckpt.plan(model, x, device=d) for d in ("H100", "cpu"))
    held = [
        [storage.bytes for storage in plan.snapshot.program.storages]  # type: ignore[union-attr]
        for plan in (away, here)
    ]
    assert held[0] == [-(-n // 512) * 512 for n in held[1]]
    assert (held[0] == held[1]) is all(n % 512 == 0 for n in held[1])
    assert away.peak_bytes >= here.peak_bytes
    assert all(peak % 512 == 0 for peak in away.profile)
    curve = fxckpt.frontier(model, x, points=2, device="H100")
    assert curve.plans[-1].peak_bytes == away.baseline_peak_bytes


def test_cpu_model_is_planned_for_a_gpu() -> None:
    """A model on the CPU is planned as one on the GPU; it stays where it is."""
    model, x = layers(500), torch.randn(2049, 500)
    plan = fxckpt.plan(model, x, budget=0.9, device="H100")
    meta = fxckpt.plan(on_meta(lambda: layers(500)), x.to("meta"), budget=0.9, device="H100")
    assert plan.to_json() == meta.to_json()
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_cpu_by_name() -> None:
    """For the CPU by name a meta model has the plan of the model itself."""
    x = torch.randn(2048, 256)
    meta = fxckpt.plan(on_meta(lambda: layers(256)), x.to("meta"), budget=0.9, device="cpu")
    assert meta.digest == fxckpt.plan(layers(256), x, budget=0.9).digest
    assert meta.cost == "roofline"


def attention_ops(**given: object) -> list[str]:
    """Return the attention ops of a joint graph for a GPU."""
    device, shape, kv, dtype, mask = (
        given.get(name, default)
        for name, default in (
            ("device", "A100"),
            ("shape", (2, 4, 32, 64)),
            ("kv", None),
            ("dtype", torch.bfloat16),
            ("mask", None),
        )
    )
    q = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)  # type: ignore[call-overload]
    k = torch.empty(kv or shape, dtype=dtype, device="meta")  # type: ignore[call-overload]

    def step(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        grouped = kv is not None
        return F.scaled_dot_product_attention(q, k, k, mask, enable_gqa=grouped).sum()

    joint = capture_joint(step, (q, k, mask), {}, planned_device(str(device), is_on_meta=True))
    values = [n.meta["val"] for n in joint.module.graph.nodes if "val" in n.meta]
    assert {t.device for t in values if isinstance(t, Tensor)} == {torch.device("cuda", 0)}
    return [str(n.target) for n in joint.module.graph.nodes if "attention" in str(n.target)]


@pytest.mark.parametrize(
    ("given", "kernel"),
    [
        ({}, "flash_attention"),
        ({"device": "H200"}, "cudnn_attention"),
        ({"device": "H100", "kv": (2, 2, 32, 64)}, "cudnn_attention"),
        ({"device": "H100", "shape": (2, 4, 32, 256)}, "flash_attention"),
        ({"device": "L40S"}, "flash_attention"),
        ({"shape": (2, 4, 32, 60)}, "flash_attention"),
        ({"kv": (2, 2, 32, 64)}, "flash_attention"),
        ({"dtype": torch.float32}, "efficient_attention"),
        ({"mask": torch.empty(32, 32, dtype=torch.bool, device="meta")}, "efficient_attention"),
        (
            {"mask": torch.empty(2, 1, 32, 32, dtype=torch.bfloat16, device="meta")},
            "efficient_attention",
        ),
        ({"dtype": torch.float64}, None),
    ],
    ids=[
        "half",
        "H200",
        "H100, grouped",
        "H100, wide",
        "L40S",
        "odd head",
        "grouped",
        "float32",
        "boolean mask",
        "additive mask",
        "float64",
    ],
)
def test_attention_is_the_gpus(given: dict[str, object], kernel: str | None) -> None:
    """Attention is planned as the kernel that a GPU runs, forward and backward."""
    name = f"aten._scaled_dot_product_{kernel}"
    expected = [] if kernel is None else [f"{name}.default", f"{name}_backward.default"]
    assert attention_ops(**given) == expected


def test_fused_attention_holds_no_scores() -> None:
    """A step with fused attention holds no matrix of scores: twice the length, twice the peak."""

    class Attention(nn.MultiheadAttention):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x, x, x, need_weights=False)[0]

    def peak(length: int) -> int:
        model = on_meta(lambda: Attention(256, 4, batch_first=True))
        plan = fxckpt.plan(model, torch.empty(1, length, 256, device="meta"))
        return plan.peak_bytes - sum(p.numel() * 4 for p in model.parameters())

    assert peak(8192) == pytest.approx(2 * peak(4096), rel=0.1)


def test_dropout_mask_is_of_booleans() -> None:
    """Dropout is the GPU's: its mask takes a byte an element."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(512, 512)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.linear(x), 0.1)

    model = on_meta(Dropping)
    x = torch.empty(64, 512, device="meta")
    joint = capture_joint(model, (x,), {}, planned_device("H100", is_on_meta=True))
    masks = [
        n.meta["val"][1]
        for n in joint.module.graph.nodes
        if n.target is torch.ops.aten.native_dropout.default
    ]
    assert [(m.dtype, m.device.type) for m in masks] == [(torch.bool, "cuda")]


def test_factories_are_on_the_device() -> None:
    """What the step makes itself is on the GPU too."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.arange(256, device=x.device)

    model, x = on_meta(lambda: Scaled(256, 256)), torch.empty(64, 256, device="meta")
    joint = capture_joint(model, (x,), {}, planned_device("H100", is_on_meta=True))
    (made,) = (n for n in joint.module.graph.nodes if "arange" in str(n.target))
    assert made.kwargs["device"] == made.meta["val"].device == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"device": "H10"}, InvalidOption, "Did you mean 'H100'"),
        ({"device": "cuda"}, InvalidOption, "no CUDA device here"),
        ({"device": "cuda:3"}, InvalidOption, r"'cuda:3'.*no CUDA device here \(torch .*, built"),
        ({"device": "cuda:x"}, InvalidOption, "'cuda:x' is not a device that fxckpt knows"),
        ({"device": torch.device("meta")}, InvalidOption, "'meta' is not a device"),
        ({"device": b"H100"}, InvalidOption, "b'H100' is of type bytes, not a device's name"),
        ({"device": ["H100"]}, InvalidOption, r"\['H100'\] is of type list, not a device's name"),
        ({"device": "H100", "cost": "measured"}, InvalidOption, "that is H100, elsewhere"),
        ({"device": "H100", "budget": "auto"}, InvalidBudget, "H100 is named.*74.5 GiB"),
        ({"budget": "auto"}, InvalidBudget, "the reference for the meta device is named"),
    ],
)
def test_refusals(options: dict[str, object], error: type[Exception], text: str) -> None:
    """What a device elsewhere cannot answer is an error that says what to do."""
    model, x = on_meta(lambda: layers(64)), torch.empty(8, 64, device="meta")
    with pytest.raises(error, match=text):
        fxckpt.plan(model, x, **options)  # type: ignore[arg-type]


def test_device_of_this_machine_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device by its number is that device; one beyond the last is refused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, number in (("cuda", 0), ("cuda:1", 1), (torch.device("cuda", 1), 1)):
        assert planned_device(name, is_on_meta=True).place == torch.device("cuda", number)
    with pytest.raises(InvalidOption, match=r"'cuda:2': the CUDA devices here are .* to 'cuda:1'"):
        planned_device("cuda:2", is_on_meta=True)
    assert planned_device("cpu:0", is_on_meta=True).place == torch.device("cpu")


@pytest.mark.parametrize(
    "make",
    [
        lambda model, x, budget: fxckpt.plan(model, x, budget=budget, device="A10G"),
        lambda model, x, budget: fxckpt.plan_step(model, x, budget=budget, device="A10G"),
        lambda model, x, budget: fxckpt.frontier(model, x, points=[budget], device="A10G"),
    ],
    ids=["plan", "plan_step", "frontier"],
)
def test_budget_beyond_the_memory_warns(make: Callable[..., object]) -> None:
    """A budget that the named device cannot have is planned with a warning of both figures."""
    model, x = on_meta(lambda: layers(64)), torch.empty(8, 64, device="meta")
    with pytest.warns(UserWarning, match="budget='25GiB' is 25.0 GiB.* one A10G, 24 GB") as told:
        make(model, x, "25GiB")
    assert len(told) == 1 and told[0].filename == __file__
    make(model, x, "24GiB")


def norm_ops(function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> list[str]:
    """Return the ops of RMS norms in a joint graph for a GPU."""
    x = torch.empty(4, 8, dtype=dtype, device="meta", requires_grad=True)
    weight = torch.empty(8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    joint = capture_joint(function, (x, weight), {}, planned_device("A100", is_on_meta=True))
    return [str(node.target) for node in joint.module.graph.nodes if "norm" in str(node.target)]


def test_rms_norm_is_the_gpus() -> None:
    """CUDA has a kernel of the norm, but not where its weight has another dtype."""
    fused = ["aten._fused_rms_norm.default", "aten._fused_rms_norm_backward.default"]
    assert norm_ops(lambda x, w: F.rms_norm(x, (8,), w).sum(), torch.bfloat16) == fused
    assert norm_ops(lambda x, w: F.rms_norm(x, (8,)).sum() * w.sum(), torch.bfloat16) == fused
    with pytest.raises(fxckpt.CaptureError, match="Cannot dispatch to fused implementation"):
        norm_ops(lambda x, w: F.rms_norm(x, (8,), w).sum(), torch.float32)
