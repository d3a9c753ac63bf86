"""diffusers' U-Net trained to predict noise, within 60 % of its memory."""

import torch
from diffusers import DDPMScheduler, UNet2DModel
from torch import nn

import fxckpt


class Loss(nn.Module):
    """A U-Net with its loss, so that both are in the compiled graph."""

    def __init__(self) -> None:
        super().__init__()
        self.model = UNet2DModel(
            sample_size=16,
            block_out_channels=(16, 32),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            norm_num_groups=8,
            attention_head_dim=8,
            dropout=0.1,
        )

    def forward(
        self, noisy: torch.Tensor, times: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(noisy, times).sample, noise)


def losses(backend: fxckpt.Backend | None) -> list[float]:
    """Return the losses of three steps."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, scheduler, seen = Loss(), DDPMScheduler(), []
    forward = torch.compile(model, backend=backend or "aot_eager_default_partitioner")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        images, noise = torch.randn(4, 3, 16, 16), torch.randn(4, 3, 16, 16)
        times = torch.randint(1000, (4,))
        loss = forward(scheduler.add_noise(images, noise, times), times, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


backend = fxckpt.Backend("60%", inner="aot_eager")
assert losses(backend) == losses(None), "the losses differ"
step = backend.report().step
assert step is not None and step.measured_peak_bytes <= step.budget_bytes, "over the budget"
print(f"equal losses, {step.measured_peak_bytes} of {step.budget_bytes} bytes")
