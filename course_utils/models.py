"""The models that several chapters share."""

import torch
from torch import nn


class MnistNet(nn.Module):
    """The 784-50-10 network: two linear layers with a ReLU between them, 39,760 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(784, 50)
        self.linear2 = nn.Linear(50, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the logits (N, 10) of images (N, 1, 28, 28), or of any (N, ...) of 784 numbers."""
        hidden = torch.relu(self.linear1(images.flatten(1)))  # (N, 50)
        return self.linear2(hidden)
