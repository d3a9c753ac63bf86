"""accelerate and transformers' Trainer, which take a backend by its name."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from datasets import Dataset
from torch import nn
from toy import QUIET, gpt2
from transformers import Trainer, TrainingArguments

from fxckpt.integrations.accelerate import register

register()


def accelerated(**plugin: object) -> list[float]:
    """Return the losses of four steps of accelerate's own loop."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)
    )
    model = nn.Sequential(*blocks)
    accelerator = Accelerator(
        cpu=True, dynamo_plugin=TorchDynamoPlugin(**plugin) if plugin else None
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    found, x = [], torch.randn(128, 64)
    for _ in range(4):
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    accelerator.free_memory()
    accelerator.state._reset_state(reset_partial_state=True)
    return found


def trained(**arguments: object) -> list[float]:
    """Return the losses of four steps of the Trainer."""
    torch.manual_seed(0)
    # Inductor draws other dropout masks than eager mode.
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = gpt2(n_layer=2, **drops, use_cache=False)
    tokens = torch.randint(0, 10, (16, 32)).tolist()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**QUIET, max_steps=4, **arguments),
        train_dataset=Dataset.from_dict({"input_ids": tokens, "labels": tokens}),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


expected = torch.tensor(accelerated())
options = {"budget": "2MiB", "inner": "aot_eager"}
whole = accelerated(backend="fxckpt", options=options)
torch.testing.assert_close(torch.tensor(whole), expected)
regions = accelerated(backend="fxckpt", options=options, use_regional_compilation=True)
torch.testing.assert_close(torch.tensor(regions), expected)

expected = torch.tensor(trained())
os.environ["FXCKPT_BUDGET"] = "8MiB"
by_name = trained(torch_compile_backend="fxckpt")
torch.testing.assert_close(torch.tensor(by_name), expected, rtol=1e-3, atol=1e-3)
print("equal losses")
