"""SDXL's U-Net, from its published configuration.

The configuration is that of stabilityai/stable-diffusion-xl-base-1.0, ``unet``; at full size it has
the 2,567,463,684 parameters of the original.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

HEAD = 64
"""Width of an attention head of SDXL's U-Net."""


class ResnetBlock(nn.Module):
    """Two normalized convolutions, with the time embedding added between them."""

    def __init__(self, inputs: int, outputs: int, embedding: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, inputs), nn.GroupNorm(32, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(embedding, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    """Attention over a context, which may be the input itself."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(context, width, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for t in (self.q(x), self.k(context), self.v(context))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Self-attention, attention to the prompt, and a gated MLP."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.prompt = Attention(width, width), Attention(width, context)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        own, given, mlp = self.norms
        h = own(x)
        x = x + self.own(h, h)
        x = x + self.prompt(given(x), prompt)
        value, gate = self.up(mlp(x)).chunk(2, dim=-1)
        return x + self.down(value * F.gelu(gate))


class Transformer(nn.Module):
    """Transformer blocks over the pixels of an image."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.enter, self.leave = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, context) for _ in range(depth))

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        h = self.enter(self.norm(x).flatten(2).transpose(1, 2))
        for block in self.blocks:
            h = block(h, prompt)
        return x + self.leave(h).transpose(1, 2).unflatten(2, x.shape[2:])


class Stage(nn.Module):
    """One resnet block and, below full resolution, a transformer."""

    def __init__(self, inputs: int, outputs: int, embedding: int, depth: int, context: int) -> None:
        super().__init__()
        self.resnet = ResnetBlock(inputs, outputs, embedding)
        self.attention = Transformer(outputs, depth, context) if depth else None

    def forward(self, x: Tensor, time: Tensor, prompt: Tensor) -> Tensor:
        x = self.resnet(x, time)
        return x if self.attention is None else self.attention(x, prompt)


class SdxlUNet(nn.Module):
    """SDXL's U-Net, and the loss of the noise it predicts.

    With ``by_block`` each stage runs in torch's checkpoint.
    """

    def __init__(
        self,
        widths: tuple[int, ...] = (320, 640, 1280),
        depths: tuple[int, ...] = (0, 2, 10),
        context: int = 2048,
    ) -> None:
        super().__init__()
        embedding = 4 * widths[0]
        self.first = widths[0]
        self.by_block = False
        self.enter = nn.Conv2d(4, widths[0], 3, padding=1)
        self.time = nn.Sequential(
            nn.Linear(widths[0], embedding), nn.SiLU(), nn.Linear(embedding, embedding)
        )
        self.added = nn.Sequential(
            nn.Linear(2816, embedding), nn.SiLU(), nn.Linear(embedding, embedding)
        )
        made, skips = widths[0], [widths[0]]
        self.down = nn.ModuleList()
        for level, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            for _ in range(2):
                self.down.append(Stage(made, width, embedding, depth, context))
                made = width
                skips.append(width)
            if level < len(widths) - 1:
                self.down.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                skips.append(width)
        self.middle = Stage(made, made, embedding, depths[-1], context)
        self.after = ResnetBlock(made, made, embedding)
        self.up = nn.ModuleList()
        for level, (width, depth) in reversed([*enumerate(zip(widths, depths, strict=True))]):
            for _ in range(3):
                self.up.append(Stage(made + skips.pop(), width, embedding, depth, context))
                made = width
            if level:
                self.up.append(
                    nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(made, made, 3, padding=1))
                )
        self.norm, self.leave = nn.GroupNorm(32, made), nn.Conv2d(made, 4, 3, padding=1)

    def forward(
        self, noisy: Tensor, noise: Tensor, step: Tensor, added: Tensor, prompt: Tensor
    ) -> Tensor:
        half = self.first // 2
        rates = torch.exp(-9.21 * torch.arange(half, device=noisy.device) / half)
        angles = step[:, None].float() * rates
        time = self.time(torch.cat((angles.cos(), angles.sin()), dim=-1).to(noisy.dtype))
        time = time + self.added(added)
        x = self.enter(noisy)
        kept = [x]
        for part in self.down:
            x = self._run(part, x, time, prompt) if isinstance(part, Stage) else part(x)
            kept.append(x)
        x = self.after(self._run(self.middle, x, time, prompt), time)
        for part in self.up:
            if isinstance(part, Stage):
                x = self._run(part, torch.cat((x, kept.pop()), dim=1), time, prompt)
            else:
                x = part(x)
        return F.mse_loss(self.leave(F.silu(self.norm(x))).float(), noise.float())

    def _run(self, stage: nn.Module, *inputs: Tensor) -> Tensor:
        if self.by_block:
            return checkpoint(stage, *inputs, use_reentrant=False)
        return stage(*inputs)
