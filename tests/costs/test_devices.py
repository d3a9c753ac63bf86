"""Devices by name, and their figures beside torch's own table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor.analysis.device_info import lookup_device_info

from fxckpt.costs.devices import DEVICES, Device, device_named, find_device
from fxckpt.costs.roofline import DeviceRoofline
from fxckpt.errors import InvalidOption


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda d: d.name)
def test_narrower_dtypes_are_faster(device: Device) -> None:
    """A narrower dtype has no lower rate, and every figure is positive."""
    rates = (device.fp32, device.tf32, device.bf16, device.fp8)
    assert list(rates) == sorted(rates)
    assert device.fp64 <= device.fp32
    assert min(*rates, device.fp64, device.to_host, device.from_host, device.memory_bytes) > 0
    shares = (device.matmul_share, device.bandwidth_share, device.attention_share)
    assert all(0 < share <= 1 for share in shares)


@pytest.mark.parametrize("name", ["NVIDIA A100", "NVIDIA H100", "AMD INSTINCT MI300X"])
def test_rates_agree_with_torchs_table(name: str) -> None:
    """Rates and bandwidth are those of torch's own table, which counts sparsity for the H100."""
    torchs, ours = lookup_device_info(name), find_device(name)
    assert torchs is not None and ours is not None
    sparse = 2 if "H100" in name else 1
    rates: list[tuple[Any, torch.dtype, bool]] = [(torch.bfloat16, torch.bfloat16, False)]
    # The table of torch 2.11 gives the H100 an A100's rate in TF32.
    if torch.__version__ >= "2.12" or "H100" not in name:
        rates.append(("torch.tf32", torch.float32, True))
    for key, dtype, tf32 in rates:
        dense = torchs.tops[key] * 1e12 / sparse
        assert ours.rate(dtype, tf32=tf32) == pytest.approx(dense, rel=0.005)
    assert ours.fp32 == pytest.approx(torchs.tops[torch.float32] * 1e12, rel=0.01)
    assert ours.bytes_per_second == pytest.approx(torchs.dram_bw_gbs * 1e9, rel=0.005)
    assert ours.memory_bytes == pytest.approx(torchs.dram_gb * 1e9)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe"),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H100 96GB HBM3", None),
        ("h100 80 GiB", "H100"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("AMD Instinct MI300X VF", "MI300X"),
        ("A100 H100", None),
        ("NVIDIA", None),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("rtx5090", "RTX 5090"),
        ("NVIDIA T4", None),
    ],
)
def test_drivers_name_finds_the_device(text: str, name: str | None) -> None:
    """A device is found by its driver's name, every word of which is of that device."""
    found = find_device(text)
    assert (found.name if found else None) == name


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("H10", "'H100'"),
        ("b20", "'B200'"),
        ("rtx 4080", "'RTX 4090'"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "'RTX 4090'"),
        ("NVIDIA GH200 480GB", "'H200'"),
        ("A100 H100", "'A100' or 'H100'"),
    ],
)
def test_unknown_name_gets_the_nearest(asked: str, near: str) -> None:
    """The error for an unknown name has the nearest one, and all that are known."""
    with pytest.raises(InvalidOption, match=f"device='{asked}' is not .*Did you mean.*{near}") as e:
        device_named(asked)
    assert all(name in str(e.value) for name in DEVICES)


@pytest.mark.parametrize("device", [b"H100", ["H100"], None, 100])
def test_what_is_no_name_is_refused(device: Any) -> None:
    """No device is found in what is not a text."""
    with pytest.raises(InvalidOption, match="is not a device that fxckpt knows"):
        device_named(device)
    with pytest.raises(InvalidOption, match="is not a device that fxckpt knows"):
        DeviceRoofline.of(device)


def test_forms_are_of_the_table() -> None:
    """Each device has its forms, and is found by its own name, with each of its words."""
    for name, device in DEVICES.items():
        assert device.forms
        found = [find_device(f"{name} {word}") for word in ("", *device.forms.split())]
        assert found == [device] * len(found)


def test_name_like_no_other_gets_the_list() -> None:
    with pytest.raises(InvalidOption, match=r"'toaster' is not .* knows\. Known:"):
        device_named("toaster")
