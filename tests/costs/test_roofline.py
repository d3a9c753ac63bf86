"""Rooflines: the time of an op on a device, by dtype, kind and settings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fxckpt.costs import calibration, models, roofline
from fxckpt.costs.devices import CUDNN_SHARE, DEVICES, LAUNCH_SECONDS
from fxckpt.costs.measured import Records, machine
from fxckpt.costs.roofline import DeviceRoofline, Roofline
from fxckpt.ops.kernels import accumulate_mm
from tests.costs import nodes

H100 = DEVICES["H100"]
SIDE = 4096
PRODUCT = 2 * SIDE**3
"""FLOPs of a square matmul."""


@pytest.fixture(autouse=True)
def own_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def node_of(function: object, *shapes: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
    """Return the last op of a traced function of tensors that take no memory."""
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=dtype) for shape in shapes]
        graph = make_fx(function)(*inputs).graph
    return next(n for n in reversed(graph.nodes) if n.op == "call_function")


def matmul(dtype: torch.dtype) -> fx.Node:
    return node_of(torch.mm, (SIDE, SIDE), (SIDE, SIDE), dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "precision", "rate"),
    [
        (torch.bfloat16, "highest", 989e12),
        (torch.float16, "highest", 989e12),
        (torch.float32, "highest", 67e12),
        (torch.float32, "high", 495e12),
        (torch.float64, "high", 67e12),
    ],
)
def test_matmul_takes_the_rate_of_its_dtype(
    dtype: torch.dtype, precision: str, rate: float
) -> None:
    """A matmul takes its dtype's rate; float32 that of TF32 where torch allows it."""
    torch.set_float32_matmul_precision(precision)
    seconds = DeviceRoofline.of("H100").seconds(matmul(dtype))
    assert seconds == pytest.approx(PRODUCT / (0.78 * rate) + LAUNCH_SECONDS)


def test_product_into_a_sum_takes_its_operands_rate() -> None:
    """The sum that a product in bfloat16 is added to is in float32; no product is stored."""
    rows, inner = 65_536, 1024
    with FakeTensorMode():
        total = torch.empty(rows, SIDE)
        operands = [
            torch.empty(shape, dtype=torch.bfloat16) for shape in ((rows, inner), (inner, SIDE))
        ]
        graph = make_fx(accumulate_mm)(total, *operands).graph
    (node,) = graph.find_nodes(op="call_function", target=accumulate_mm)
    flops, nbytes = 2 * rows * inner * SIDE, 8 * rows * SIDE + 2 * inner * (rows + SIDE)
    model = DeviceRoofline.of("H100")
    assert model.flops(node) == flops
    bandwidth = H100.bytes_per_second * H100.bandwidth_share
    expected = max(flops / (0.78 * 989e12), nbytes / bandwidth) + LAUNCH_SECONDS
    assert model.seconds(node) == pytest.approx(expected)


def test_legacy_switch_allows_tf32() -> None:
    """``allow_tf32`` is read too."""
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        seconds = DeviceRoofline.of("H100").seconds(matmul(torch.float32))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert seconds == pytest.approx(PRODUCT / (0.78 * 495e12) + LAUNCH_SECONDS)


def test_convolution_takes_tf32_unless_forbidden() -> None:
    """A float32 convolution takes TF32 unless cuDNN may not, as in torch."""
    shapes = (8, 256, 64, 64), (256, 256, 3, 3)
    node = node_of(F.conv2d, *shapes, dtype=torch.float32)
    # In a process where torch's test helpers were imported, only the context manager may set this.
    with torch.backends.cudnn.flags(allow_tf32=True):
        fast = DeviceRoofline.of("H100").seconds(node)
    with torch.backends.cudnn.flags(allow_tf32=False):
        slow = DeviceRoofline.of("H100").seconds(node)
    launch = LAUNCH_SECONDS
    assert (slow - launch) / (fast - launch) == pytest.approx(495 / 67)


def test_attention_has_a_share_of_its_own() -> None:
    """Fused attention reaches less of the rate than a matmul."""

    def attention(q: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)[0]

    shape = (1, 16, 8192, 128)
    with FakeTensorMode():
        q = torch.empty(shape, dtype=torch.bfloat16)
        graph = make_fx(attention)(q).graph
    (node,) = (n for n in graph.nodes if "attention" in str(n.target))
    flops = 4 * 16 * 8192**2 * 128
    seconds = DeviceRoofline.of("H100").seconds(node)
    assert seconds == pytest.approx(flops / (CUDNN_SHARE * 989e12) + LAUNCH_SECONDS)


def test_odd_vocabulary_leaves_tensor_cores_idle() -> None:
    """A matmul whose rows do not begin at multiples of 16 bytes reaches a sixth of the rate."""
    odd, even = (
        DeviceRoofline.of("H200").seconds(
            node_of(torch.mm, (4096, 4096), (4096, n), dtype=torch.bfloat16)
        )
        - LAUNCH_SECONDS
        for n in (50_257, 50_264)
    )
    assert odd / even == pytest.approx(6, rel=0.01)


def test_pointwise_takes_the_bandwidth() -> None:
    """A pointwise op takes the bandwidth that kernels reach."""
    node = node_of(torch.add, (2**26,), (2**26,), dtype=torch.float32)
    seconds = DeviceRoofline.of("H100").seconds(node)
    assert seconds == pytest.approx(3 * 2**28 / (0.92 * 3.35e12) + LAUNCH_SECONDS)


@pytest.mark.parametrize("named", [None, H100])
def test_replayed_kernels_cost_no_launch(named: object) -> None:
    """Under CUDA graphs a launch takes no time."""
    gpu = torch.device("cuda", 0)
    node = node_of(torch.add, (1,), (1,), dtype=torch.float32)
    launched, replayed = (
        models.resolve("roofline", gpu, named=named, replays=replays).seconds(node)  # type: ignore[arg-type]
        for replays in (False, True)
    )
    assert launched - replayed == pytest.approx(LAUNCH_SECONDS)


def test_answers_are_the_same_when_checked() -> None:
    """The check that counts FLOPs once for equal calls changes no answer."""
    model = DeviceRoofline.of("A100")
    checked = models.checked(model)
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        node = matmul(dtype)
        assert checked.seconds(node) == model.seconds(node)


def test_calibration_replaces_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is priced by its calibration, without one by the table, else by a guess."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setenv("FXCKPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Nonesuch")
    assert isinstance(roofline.device_roofline(gpu), Roofline)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert roofline.device_roofline(gpu) == DeviceRoofline.of(H100)
    records, device = Records.of_machine(), torch.device("cpu")
    figures = calibration.calibrate(device, records, calibration.SMALL)
    for name in calibration.FIGURES:
        records.keep(f"{machine(gpu)} {name}", getattr(figures, name))
    found = roofline.device_roofline(gpu)
    assert isinstance(found, DeviceRoofline)
    assert found.device.bf16 == figures.bf16
    assert found.device.name == "NVIDIA H100 80GB HBM3, calibrated"


@pytest.mark.parametrize(
    ("rates", "seconds"),
    [((1e3, math.inf, 0.0), 2 * 8**3 / 1e3), ((math.inf, 1e3, 0.0), 3 * 4 * 64 / 1e3)],
    ids=["arithmetic", "memory"],
)
def test_the_slower_rate_counts(rates: tuple[float, float, float], seconds: float) -> None:
    """A product takes its FLOPs or its bytes, whichever takes longer."""
    node = nodes.node_of(lambda a, b: a @ b, torch.ones(8, 8), torch.ones(8, 8))
    assert Roofline(*rates).seconds(node) == pytest.approx(seconds)


def test_every_op_is_launched() -> None:
    """The launch is added to the time, also of an op without bytes."""
    node = nodes.node_of(lambda a: a + a, torch.ones(0))
    assert Roofline(1.0, 1.0, 0.5).seconds(node) == 0.5


def test_random_numbers_take_time() -> None:
    """An op that draws takes the time of the generator."""
    slow = Roofline(1e12, 1e12, 0.0, draws_per_second=1e3)
    drawing = nodes.node_of(lambda a: torch.rand_like(a), torch.ones(100))
    assert slow.seconds(drawing) == 0.1
    assert slow.seconds(nodes.node_of(lambda a: a + a, torch.ones(100))) < 0.1
