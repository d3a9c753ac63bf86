"""A convolutional net with batch norms, its blocks compiled one by one under one budget."""

import torch
from torch import nn

import fxckpt


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.SiLU(),
            nn.Dropout2d(0.1),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.body(x)).relu()


class Net(nn.Module):
    """A stem, blocks and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 10)
        self.blocks = nn.ModuleList(Block(16) for _ in range(6))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def trained(budget: str | None) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Return the losses, the state with its running statistics, and the peak of the last step."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, seen, peak = Net(), [], 0
    if budget is not None:
        # A step begins at its first compiled block: the stem is one, so that its output counts.
        fxckpt.compile_blocks([model.stem, *model.blocks], budget, inner="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))

        def step(images: torch.Tensor = images, labels: torch.Tensor = labels) -> None:
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            seen.append(loss.item())

        peak = fxckpt.measure_peak(step)
        optimizer.step()
        optimizer.zero_grad()
    return seen, model.state_dict(), peak


plain, state, whole = trained(None)
limit = int(0.6 * whole)
found, same, peak = trained(f"{limit}B")
assert found == plain, "the losses differ"
assert all(torch.equal(state[name], same[name]) for name in state), "the statistics differ"
assert peak <= limit, "over the budget"
print(f"equal losses, {peak} of {limit} bytes, {whole} without")
