"""Two blocks, and the values that each policy saves of them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import fxckpt
from fxckpt.policies import (
    Policy,
    Value,
    as_policy,
    block_boundaries,
    every,
    first_match,
    recompute,
    recompute_all,
    recompute_pointwise,
    save,
    save_all,
    save_any_except,
    save_attention,
    save_matmuls,
    save_only,
    save_ops,
    sqrt_n,
)

WIDTH = 16


MUST_SAVE, PREFER_SAVE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE


MUST_RECOMPUTE, PREFER_RECOMPUTE = (
    CheckpointPolicy.MUST_RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE,
)


aten = torch.ops.aten


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x).view(2, 8, 2, WIDTH // 2).transpose(1, 2)
        out = fxckpt.name(F.scaled_dot_product_attention(y, y, y), "attn_out")
        return out.transpose(1, 2).reshape(2, 8, WIDTH)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.down(self.up(x).tanh().sin())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)).sum()


def net() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Net(), (torch.randn(2, 8, WIDTH),)


def torch_style(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return MUST_SAVE if op is aten.tanh.default else PREFER_RECOMPUTE


# One block: addmm (qkv), attention (getitem: its result, getitem_1: its logsumexp), add,
# addmm_1 (up), tanh, sin, addmm_2 (down), add_1.
# The backward reads neither products that are only added to, nor the arguments of tanh.
READ = (
    "addmm getitem getitem_1 add tanh sin add_1 "
    "addmm_3 getitem_2 getitem_3 add_2 tanh_1 sin_1 add_3"
)


PRODUCTS = "addmm addmm_1 addmm_2 addmm_3 addmm_4 addmm_5"


ATTENTION = "getitem getitem_1 getitem_2 getitem_3"


EXPECTED: dict[str, tuple[Any, str]] = {
    "none": (None, READ),
    "save_all": (save_all, READ),
    "recompute_all": (recompute_all, ""),
    "save_matmuls": (save_matmuls, PRODUCTS),
    "save_attention": (save_attention, ATTENTION),
    "recompute_pointwise": (recompute_pointwise, f"{PRODUCTS} {ATTENTION}"),
    "sqrt_n": (sqrt_n, "add add_1 add_2 addmm_5"),
    "every": (every(3), "add sin addmm_3 addmm_4 addmm_5"),
    "every second product": (every(2, of=save_matmuls), "addmm_1 addmm_3 addmm_5"),
    "block_boundaries": (block_boundaries("layers.*"), "add_1 add_3"),
    "ops": (save_ops(aten.addmm), PRODUCTS),
    "one overload": (save_ops(aten.add.Tensor), "add add_1 add_2 add_3"),
    "save": (first_match(save("layers.*.attn"), recompute_all), f"addmm addmm_3 {ATTENTION}"),
    "recompute": (recompute("layers.1.**"), "addmm getitem getitem_1 add tanh sin add_1"),
    "save_only": (save_only("attn_out"), ATTENTION),
    "save_any_except": (
        save_any_except("attn_*"),
        "addmm add tanh sin add_1 addmm_3 add_2 tanh_1 sin_1 add_3",
    ),
    "either": (save_matmuls | save_attention, f"{PRODUCTS} {ATTENTION}"),
    "both": (
        save("layers.0") & save_matmuls,
        "addmm addmm_1 addmm_2 addmm_3 getitem_2 getitem_3 add_2 tanh_1 sin_1 add_3",
    ),
    "opposite": (~recompute_pointwise, "add tanh sin add_1 add_2 tanh_1 sin_1 add_3"),
    "function": (torch_style, "tanh tanh_1"),
    "list of ops": ([aten.tanh.default, aten.mm.default], "tanh tanh_1"),
    "context_fn": (
        functools.partial(create_selective_checkpoint_contexts, [aten.tanh.default]),
        "tanh tanh_1",
    ),
    "list of policies": ([save_attention, save("**.down")], f"addmm_2 addmm_5 {ATTENTION}"),
}


def fixed(answer: CheckpointPolicy | None) -> Policy:
    return as_policy(lambda *_: answer) if answer is not None else save("elsewhere")


def decided(policy: Policy) -> CheckpointPolicy | None:
    return policy.decide(Value(aten.sin.default, module="here"))


ANSWERS = (MUST_SAVE, PREFER_SAVE, PREFER_RECOMPUTE, MUST_RECOMPUTE, None)


def tanh_alone(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy | None:
    return MUST_SAVE if op is aten.tanh.default else None
