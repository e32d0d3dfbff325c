"""Models as chains of layers, which stages can be cut from."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from course_utils.lesson.models import LanguageModel, MnistConvNet, MnistNet


class Enter(nn.Module):
    """The tables of a language model."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.token, self.position = model.token, model.position

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position(
            torch.arange(tokens.shape[1], device=tokens.device)
        )


def chain(model: nn.Module) -> list[nn.Module]:
    """The layers of a model, in the order in which they are called; they stay the model's own."""
    match model:
        case MnistNet():
            first, second = model.linear1, model.linear2
            return [nn.Sequential(nn.Flatten(), first), nn.Sequential(nn.ReLU(), second)]
        case MnistConvNet():
            return [model.layers[a:b] for a, b in ((0, 3), (3, 6), (6, 9), (9, 10))]
        case LanguageModel():
            return [Enter(model), *model.blocks, nn.Sequential(model.norm, model.head)]
    raise TypeError(f"{type(model).__name__} is no chain of layers here")


def stages(model: nn.Module, count: int) -> list[nn.Sequential]:
    """Cuts a model into `count` stages with about as many layers each."""
    layers = chain(model)
    size, longer = divmod(len(layers), count)
    ends = [0]
    for stage in range(count):
        ends.append(ends[-1] + size + (stage < longer))
    return [nn.Sequential(*layers[a:b]) for a, b in pairwise(ends)]
