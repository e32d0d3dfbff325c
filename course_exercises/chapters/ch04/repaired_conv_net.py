"""Exercise 4.4, `RepairedConvNet`: what it asks for, and how it is checked."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, same
from course_exercises.chapters.ch04.shared import (
    CPU,
    META,
    NO_SUCH_GPU,
    PLACES,
    watched_moves,
)

repairing = Exercise(
    "4.4",
    "RepairedConvNet",
    points=2,
    minutes=25,
    kind="first",
    parameters=("image_size", "devices"),
    hints=[
        (
            "Follow one batch through the model and write the shape behind each line. Where a "
            "convolution's output (N, channels, height, width) meets a linear layer, something is missing."
        ),
        (
            "The first linear layer's number of inputs depends on the size of the image. Compute it "
            "with the formula, for height and width, or run the convolution on one image of zeros "
            "and look."
        ),
        (
            "Call `super().__init__()`, give `forward` its `self`, put `nn.Flatten()` between pooling "
            "and linear layer, compute what the latter takes, use `devices`, and move the inputs "
            "too."
        ),
    ],
    misconceptions={
        "no-self": "A method's first parameter is the object itself. Without `self` in `forward`, Python "
        "hands the model over as `x` and has no place for the images.",
        "no-flatten": "A linear layer works on the last dimension, and here that is the width of the "
        "picture. Flatten each image between pooling and linear layer.",
        "batch-lost": "The batch dimension is lost or cut anew. Flatten each image by itself, `flatten(1)`: "
        "`flatten()` takes the batch along, `view(-1, n)` with a fixed n mixes the images, and `squeeze` drops a "
        "batch of one.",
        "in-features-wrong": "The first linear layer does not take what pooling leaves of an image of this size. "
        "Compute it from `image_size`, channels x height x width, height and width each by the formula for the "
        "convolution and again for the pooling, each time rounded down. A lazy layer would have no parameters until "
        "the first batch.",
        "layers-changed": "The layers are not those of the model above: their kinds, order, shapes, kernels, strides "
        "or paddings differ. A pooling to one fixed size makes shapes fit, and is another model.",
        "not-logits": "You return probabilities or classes. The loss needs the logits, ten numbers for each image: "
        "cross_entropy has the softmax inside.",
        "misplaced": "A layer is on the wrong device. Up to the first linear layer they belong on `devices[0]`, the "
        "others on `devices[1]`, whatever these are, and the constructor moves them there.",
        **PLACES,
    },
    things="logits",
    failures={
        **NO_SUCH_GPU,
        "before Module.__init__": "no-super",
        "super().__init__": "no-super",
        "positional argument": "no-self",
        "Cannot copy out of meta": "output-elsewhere",
        "multiplied (1x": "batch-lost",  # one row, where there are two images and more
        "shape '[-1": "batch-lost",
        "x4 and ": "no-flatten",  # rows of 4 numbers, the width that pooling leaves of 16 pixels
        "mat1 and mat2": "in-features-wrong",
        "is invalid for input of size": "in-features-wrong",
        "'tuple' and 'int'": "in-features-wrong",
        "got float": "in-features-wrong",
    },
    at_home=True,
)


def _pooled(pixels: int) -> int:
    """Height or width behind the convolution and the pooling."""
    convolved = (pixels + 2 * 3 - 7) // 2 + 1
    return (convolved + 2 * 1 - 3) // 2 + 1


def _shapes(image_size: tuple[int, int]) -> list[tuple[int, ...]]:
    features = 64 * _pooled(image_size[0]) * _pooled(image_size[1])
    linear = [(512, features), (512,), (256, 512), (256,), (10, 256), (10,)]
    return [(64, 3, 7, 7), (64,), *linear]


def _logits(parameters: list[Tensor], images: Tensor) -> Tensor:
    convolution, *linear = zip(parameters[::2], parameters[1::2])
    x = functional.conv2d(images, *convolution, stride=2, padding=3).relu()
    x = functional.max_pool2d(x, kernel_size=3, stride=2, padding=1).flatten(1)
    for i, (weight, bias) in enumerate(linear):
        x = functional.linear(x if i == 0 else x.relu(), weight, bias)
    return x


def _repaired(answer, draw, image_size, devices) -> nn.Module:
    torch.manual_seed(draw.seed())
    model = answer(image_size, devices)
    expect_type(model, nn.Module)
    parameters = list(model.parameters())
    if any(isinstance(p, nn.UninitializedParameter) for p in parameters):
        raise Wrong("in-features-wrong", expected="a shape for every parameter", got="none yet")
    return model


def _must_be_logits(logits: Tensor, count: int, of: str) -> None:
    expect_type(logits, Tensor)
    if logits.shape == (count, 10):
        return
    slug = "layers-changed" if logits.dim() == 2 and len(logits) == count else "batch-lost"
    if logits.dim() > 2:
        slug = "no-flatten"
    elif logits.shape == (count,):
        slug = "not-logits"
    raise Wrong(slug, expected=f"shape {(count, 10)} of {of}", got=f"shape {tuple(logits.shape)}")


def _check_logits(answer, draw, image_size) -> None:
    model = _repaired(answer, draw, image_size, [CPU, CPU])
    images = draw.tensor(draw.integer(2, 4), 3, *image_size)
    logits = model(images)
    _must_be_logits(logits, len(images), "the logits")
    shapes, expected = [tuple(p.shape) for p in model.parameters()], _shapes(image_size)
    if shapes != expected:
        expected = f"parameters of shapes {expected}"
        raise Wrong("layers-changed", expected=expected, got=shapes)
    likely = {"not-logits": same(logits.sum(1), torch.ones(len(images))), "layers-changed": True}
    wanted = _logits(list(model.parameters()), images)
    expect(logits, wanted, what="the logits", likely=likely)
    if not logits.requires_grad:
        raise Wrong("cut-from-the-graph", expected="logits with a graph", got="none")
    logits.sum().backward()
    if any(parameter.grad is None for parameter in model.parameters()):
        expected = "a gradient for every parameter"
        raise Wrong("cut-from-the-graph", expected=expected, got="none for some")
    _must_be_logits(model(images[:1]), 1, "one image's logits")


@repairing.requires("images of 16 x 16 pixels, from which pooling leaves 1024 numbers")
def images_of_16_x_16_pixels(answer, draw):
    _check_logits(answer, draw, (16, 16))


@repairing.requires("other sizes", needs_earlier=True)
def other_sizes(answer, draw):
    for size in (draw.choice([24, 28, 32]), draw.choice([19, 23, 25])):
        _check_logits(answer, draw, (size, size))


@repairing.requires("height and width differ", needs_earlier=True)
def height_and_width_differ(answer, draw):
    for short, long in zip(draw.sample([12, 14, 18], 2), draw.sample([22, 27, 31], 2)):
        _check_logits(answer, draw, (short, long))
        _check_logits(answer, draw, (long, short))


@repairing.requires("each part is on its device, and what passes is moved", needs_earlier=True)
def each_part_is_on_its_device(answer, draw):
    for devices in ([CPU, META], [META, META]):
        model = _repaired(answer, draw, (16, 16), devices)
        places = [p.device for p in model.parameters()]
        if places != [devices[0]] * 4 + [devices[1]] * 4:
            expected = f"4 tensors on {devices[0]}, 4 on {devices[1]}"
            raise Wrong("misplaced", expected=expected, got=places)
        with watched_moves():
            logits = model(draw.tensor(draw.integer(2, 4), 3, 16, 16))
        if logits.device != devices[1]:
            raise Wrong("output-elsewhere", expected=f"on {devices[1]}", got=f"on {logits.device}")
