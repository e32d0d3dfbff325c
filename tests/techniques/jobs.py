"""What the techniques train: models from friendly to awkward, on MNIST and on the course's story."""

import math
from argparse import Namespace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, mse_loss, scaled_dot_product_attention

from course_exercises.authoring import load_answer, load_code
from course_exercises.mine.train_06 import Transformer
from course_utils.lesson import mnist, text
from course_utils.lesson.models import LanguageModel, MnistConvNet, MnistNet, ResidualNet
from tests.techniques import Job, mean_loss

# rows of each global batch; 11 and 13 divide by no world size, and 2 leaves ranks without a row
EVEN, UNEVEN = (24, 24, 24), (24, 11, 13, 2)
BALANCED = (8,) * 9  # so many steps that the load comes near to even, and ranks differ about it
CONTEXT = 12  # tokens of a window
LONG_CONTEXT, LONG = 16, (4,) * 5  # two chunks for each of 4 ranks; five steps with momentum
# what an elastic sampler shares out; the last step of an epoch has less than the others
SAMPLES, GLOBAL_BATCH, EPOCHS, STEPS_PER_EPOCH = 66, 24, 2, 3

ElasticSampler = load_answer("9.2")
Gated, route = load_code(6, "Gated"), load_answer("11.1")
MixtureModel = load_code(11, "MixtureModel")
fits, through_queues = load_code(11, "fits"), load_code(11, "through_queues")
best_experts, share_of_balance = load_code(11, "best_experts"), load_code(11, "share_of_balance")
BALANCE = (
    4.0  # the weight of the balance loss: with the usual 0.01, no comparison would see its mistakes
)
BIAS_RATE = 0.1  # a hundred times the usual one: nine steps have to change routes


class Awkward(nn.Module):
    """A tied, a frozen and an unused layer; shapes that divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(784, 13)
        self.middle = nn.Linear(13, 13)
        self.unused = nn.Linear(13, 7)
        self.tied = nn.Linear(13, 13)
        self.tied.weight = self.middle.weight
        self.last = nn.Linear(13, 10)
        self.last.bias.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.flatten(1)).tanh()
        return self.last(self.tied(self.middle(hidden).tanh()).tanh())


class Part(nn.Module):
    """A stage of exercises 7.3 and 7.4; it has the whole of what they cut in a tensor group."""

    WIDTH, HIDDEN = 6, 8

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(self.WIDTH) + 0.5)
        self.up = nn.Linear(self.WIDTH, self.HIDDEN)
        self.down = nn.Linear(self.HIDDEN, self.WIDTH, bias=False)
        self.bias = nn.Parameter(torch.rand(self.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.scale * x).relu()) + self.bias


class Pages(nn.Module):
    """Causal attention whose parameters are the queries, keys and values themselves."""

    SHAPE = 4, 16, 3  # heads, tokens, width of a head

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(1, *self.SHAPE)) for _ in range(3))

    def forward(self, ignored: Tensor) -> Tensor:
        return scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True)


def samples() -> tuple[Tensor, Tensor]:
    """The images and labels that an elastic sampler numbers."""
    return mnist.tensors(train=True, limit=SAMPLES)


def small_language_model(tied: bool = False) -> LanguageModel:
    """Sizes that divide by 2, 3 and 4 ranks, and a layer for each of 4 stages."""
    vocabulary = len(text.vocabulary())
    return LanguageModel(vocabulary, width=24, heads=12, layers=4, context=CONTEXT, tied=tied)


def make_jobs() -> dict[str, Job]:
    images = mnist.tensors(train=True, limit=max(sum(EVEN), sum(UNEVEN)))
    small = avg_pool2d(images[0], 4).flatten(1), images[1]  # 7 x 7 pixels
    windows = text.windows(CONTEXT, sum(EVEN))
    numbers = torch.randn(2, sum(EVEN), Part.WIDTH, generator=torch.Generator().manual_seed(0))
    long = text.windows(LONG_CONTEXT, sum(LONG))
    pages = torch.randn(2, 5, *Pages.SHAPE, generator=torch.Generator().manual_seed(0))
    return {
        "even": Job(MnistNet, _batches(images, EVEN)),
        "uneven": Job(MnistNet, _batches(images, UNEVEN)),
        "awkward": Job(Awkward, _batches(images, UNEVEN)),
        "residual": Job(partial(ResidualNet, 24, 2), _batches(small, UNEVEN)),
        "convolutional": Job(MnistConvNet, _batches(images, EVEN)),
        "language": Job(small_language_model, _batches(windows, EVEN)),
        "transformer": Job(_transformer, _batches(windows, EVEN)),
        "tied language": Job(_tied_language_model, _batches(windows, EVEN)),
        "gated language": Job(_gated_language_model, _batches(windows, EVEN)),
        "long language": Job(_long_language_model, _batches(long, LONG), momentum=0.9),
        "attention": Job(Pages, _batches(pages, (1,) * 5), mse_loss, momentum=0.9),
        "experts": _experts(math.inf, _batches(windows, EVEN)),
        "experts, capacity 1.25": _experts(1.25, _batches(windows, EVEN)),
        "experts, capacity 0.75": _experts(0.75, _batches(windows, EVEN)),
        "experts, bias": Job(_with_bias, _batches(windows, BALANCED), _loss_and_balance),
        "uneven experts": _experts(1.25, _batches(windows, UNEVEN)),
        "sampled": Job(MnistNet, _sampled()),
        "one part": Job(partial(_parts, 1), _batches(numbers, EVEN), mse_loss),
        "two parts": Job(partial(_parts, 2), _batches(numbers, EVEN), mse_loss),
    }


def _sampled() -> list[tuple[Tensor, Tensor]]:
    """The global batches of all epochs, as one rank gets them."""
    sampler, batches = ElasticSampler(SAMPLES, GLOBAL_BATCH, rank=0, world_size=1), []
    images, labels = samples()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        batches += [(images[rows], labels[rows]) for rows in sampler]
    return batches


def _tied_language_model() -> LanguageModel:
    return small_language_model(tied=True)


def _gated_language_model() -> LanguageModel:
    model = small_language_model()
    for block in model.blocks:
        block.feed_forward = Gated(24, 48)
    return model


def _transformer() -> Transformer:
    sizes = Namespace(width=24, heads=4, kv_heads=2, layers=4, context=CONTEXT)
    return Transformer(len(text.vocabulary()), sizes)


def _long_language_model() -> LanguageModel:
    vocabulary = len(text.vocabulary())
    return LanguageModel(vocabulary, width=16, heads=4, layers=2, context=LONG_CONTEXT)


def _experts(capacity_factor: float, batches: list[tuple[Tensor, Tensor]]) -> Job:
    return Job(partial(_with_queues, capacity_factor), batches, _loss_and_balance)


def _with_queues(capacity_factor: float) -> nn.Module:
    """The lesson's model, whose experts take so many pieces as the further notebook lets them."""
    model = MixtureModel()
    layer = model.blocks[1].feed_forward
    layer.capacity_factor = capacity_factor
    layer.forward = partial(_forward_with_queues, layer)
    return model


def _forward_with_queues(layer: nn.Module, x: Tensor) -> Tensor:
    tokens = x.flatten(0, -2)
    logits = layer.router(tokens)
    chosen = best_experts(logits, layer.k)
    all_choices = layer.gather(chosen[0])
    layer.balance = share_of_balance(logits, all_choices)
    before = dist.get_rank() * len(tokens) if len(all_choices) > len(tokens) else 0
    kept = fits(all_choices, logits.shape[1], layer.capacity_factor)[before:][: len(tokens)]
    mixed = through_queues(layer.run, layer.experts, tokens, chosen, kept)
    return (layer.shared(tokens) + mixed).view_as(x)


def _with_bias() -> nn.Module:
    """The lesson's model, whose experts are balanced by a bias in place of the loss."""
    model = MixtureModel()
    layer = model.blocks[1].feed_forward
    layer.register_buffer("bias", torch.zeros(len(layer.experts)))
    layer.forward = partial(_forward_with_bias, layer)
    return model


def _forward_with_bias(layer: nn.Module, x: Tensor) -> Tensor:
    """All pieces are served. What the whole batch has chosen moves the bias for the next one."""
    tokens = x.flatten(0, -2)
    choices, weights = route(layer.router(tokens), layer.bias, layer.k)
    layer.balance = tokens.new_zeros(())
    load = layer.gather(choices).flatten().bincount(minlength=len(layer.bias)).float()
    layer.bias -= BIAS_RATE * (load - load.mean()).sign()
    pieces = tokens.repeat_interleave(layer.k, dim=0)
    results = layer.run(layer.experts, pieces, choices.flatten()).view(*choices.shape, -1)
    return (layer.shared(tokens) + (weights[:, :, None] * results).sum(1)).view_as(x)


def _loss_and_balance(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return mean_loss(outputs[0], targets) + BALANCE * outputs[1]


def _parts(count: int) -> nn.Sequential:
    return nn.Sequential(*(Part() for _ in range(count)))


def _batches(data: tuple[Tensor, Tensor], sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    inputs, targets = (tensor[: sum(sizes)].split(sizes) for tensor in data)
    return list(zip(inputs, targets, strict=True))
