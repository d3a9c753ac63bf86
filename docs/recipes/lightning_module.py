"""A LightningModule that logs and validates, its model within a budget."""

import lightning as L
import torch
from torch import Tensor, nn

from fxckpt.integrations.lightning import FxckptCallback


class Task(L.LightningModule):
    """A model, its loss, and both logged."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)
        )
        self.model = nn.Sequential(*blocks)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Return the loss of a batch."""
        loss = self.model(batch).square().mean()
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        """Log the loss of a batch."""
        self.log("validation", self.model(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), 1e-2)


def losses(*callbacks: FxckptCallback) -> list[float]:
    """Return the losses of two epochs."""
    torch.manual_seed(0)
    task = Task()
    data = torch.utils.data.DataLoader(torch.randn(512, 32), batch_size=256)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(task, data, data)
    return task.losses


budgeted = FxckptCallback("model", budget="min", inner="aot_eager")
assert losses(budgeted) == losses(), "the losses differ"
(plan,) = budgeted.backend.plans
assert plan.peak_bytes < plan.baseline_peak_bytes
print(f"equal losses, peak {plan.peak_bytes / plan.baseline_peak_bytes:.0%} of the model's own")
