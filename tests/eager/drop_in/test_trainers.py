"""Regions in transformers, with its own hook, and in DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import fxckpt
from tests.eager.regions import plain
from tests.steps import differing, outcome


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    config = hf.GPT2Config(
        n_layer=3,
        n_embd=32,
        n_head=4,
        vocab_size=61,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(0, 61, (2, 16))
    return hf.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    config = hf.T5Config(
        d_model=32,
        d_ff=64,
        d_kv=8,
        num_layers=2,
        num_heads=4,
        vocab_size=61,
        decoder_start_token_id=0,
        dropout_rate=0.1,
    )
    tokens = torch.randint(1, 61, (2, 16))
    return hf.T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens}


def trained(
    make: Callable[[], tuple[nn.Module, dict[str, Tensor]]], prepare: Callable[[nn.Module], Any]
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, inputs = make()
    model.train()
    prepare(model)
    return outcome(model, lambda *_: model(**inputs, use_cache=False).loss, ())


@pytest.mark.filterwarnings(
    "ignore:.*use_cache:UserWarning", "error:.*gradient_checkpointing_enable:FutureWarning"
)
@pytest.mark.parametrize("make", [gpt2, t5])
@pytest.mark.parametrize(
    "options", [{}, {"policy": fxckpt.policies.save_matmuls}], ids=["plain", "policy"]
)
def test_transformers_train_the_same(
    make: Callable[[], tuple[nn.Module, dict[str, Tensor]]], options: dict[str, Any]
) -> None:
    with fxckpt.record_regions() as found:
        got = trained(make, lambda model: fxckpt.patch_transformers(model, **options))
    assert len(found) >= 3 and any(row.what == "recomputed" for row in found[0].rows)
    assert differing(trained(make, lambda model: None), got) == []


def test_transformers_own_hook_takes_checkpoint() -> None:
    def prepare(model: Any) -> None:
        model._set_gradient_checkpointing(
            enable=True, gradient_checkpointing_func=fxckpt.checkpoint
        )

    assert differing(trained(gpt2, lambda model: None), trained(gpt2, prepare)) == []


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_a_region_in_a_module_that_ddp_wraps(one_rank: None) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU()) for _ in range(3)
            )
            self.checkpoint: Callable[..., Any] = plain

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = self.checkpoint(block, x)
            return x

    def run(checkpoint: Callable[..., Any]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net, x = Net(), torch.randn(8, 4)
        net.checkpoint = checkpoint
        return outcome(net, nn.parallel.DistributedDataParallel(net, static_graph=False), (x,))

    assert differing(run(plain), run(fxckpt.checkpoint)) == []
