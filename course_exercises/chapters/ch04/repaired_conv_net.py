"""Exercise 4.4, `RepairedConvNet`: what it asks for, and how it is checked."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, same
from course_exercises.chapters.ch04.shared import CPU, META, NO_SUCH_GPU, watched_moves

repairing = Exercise(
    "4.4",
    "RepairedConvNet",
    points=2,
    minutes=20,
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
        "no-super": "Modules are registered by nn.Module's own constructor: call "
        "`super().__init__()` first.",
        "no-self": "A method's first parameter is the object itself. Without `self` in `forward`, Python "
        "hands the model over as `x` and has no place for the images.",
        "devices-fixed": "You name devices of your own. Use those in `devices`, whatever they are.",
        "class-not-module": "A layer has to be made before it goes into nn.Sequential: "
        "`nn.Flatten()`, with parentheses.",
        "size-is-a-pair": "`image_size` is a pair, (height, width): take it apart first.",
        "classes-not-logits": "Asked are the logits, ten numbers for each image, not the class with "
        "the largest one: the loss needs them all.",
        "no-flatten": "A linear layer works on the last dimension, and here that is the width of the "
        "picture. Flatten each image between pooling and linear layer.",
        "batch-flattened": "The batch dimension has been flattened too. Flatten each image by itself: "
        "`flatten(1)` begins behind the batch dimension.",
        "batch-mixed": "There is not one row of logits per image. A `view(-1, n)` with a fixed n cuts "
        "the numbers of all images anew; the batch dimension must stay.",
        "in-features-wrong": "The first linear layer does not take as many numbers as pooling leaves "
        "of an image of this size. Compute them from `image_size`: channels x height x width, with "
        "the formula for the convolution and again for the pooling, each rounded down.",
        "square-only": "Height and width are computed separately: what fits square images need not "
        "fit these.",
        "adaptive-pool": "You pool every image to one fixed size. That makes the shapes fit and "
        "throws away part of the picture: it is another model.",
        "lazy-parameters": "A lazy layer has no parameters until the first batch, so an optimizer "
        "that is built before finds nothing to hold. Compute the number of inputs.",
        "layer-changed": "The layers are not those of the model above: their number, their order "
        "or their shapes differ.",
        "pooling-changed": "Pooling leaves another number of values than that of the model above: look "
        "at its kernel, stride and padding, and at those of the convolution.",
        "gradient-lost": "Backward does not reach the first part: `detach`, `.data` and `torch.no_grad` "
        "cut the graph, and `.to` does not.",
        "batch-dropped": "One image is a batch as well: its logits have the shape (1, 10). `squeeze` "
        "drops the dimension.",
        "softmax-added": "You return probabilities. Asked are logits, as in the model above: "
        "cross_entropy has the softmax inside.",
        "nothing-placed": "The parts are where they were made: move each to its device.",
        "wrong-part": "A layer is on the wrong device: up to the first linear layer they belong on "
        "devices[0], the others on devices[1].",
        "input-not-moved": "The images may come from any device: move them before the first part.",
        "activation-not-moved": "The activations stay on the first device, and the second part's "
        "parameters are on the other. `x.to(device)` returns the moved tensor: use the result.",
        "output-elsewhere": "The logits belong on `devices[1]`: the loss is computed there.",
    },
    failures={
        **NO_SUCH_GPU,
        "before Module.__init__": "no-super",
        "super().__init__": "no-super",
        "positional argument": "no-self",
        "Cannot copy out of meta": "output-elsewhere",
        "is not a Module subclass": "class-not-module",
        "'tuple' and 'int'": "size-is-a-pair",
        "got float": "in-features-wrong",
        "shape '[-1": "batch-mixed",
        "is invalid for input of size": "in-features-wrong",
    },
    at_home=True,
)


# One row, where there are two images and more: no batch is left.
LOST_BATCH = {"multiplied (1x": "batch-flattened"}


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
        raise Wrong("lazy-parameters", expected="a shape for every parameter", got="none yet")
    return model


def _check_logits(answer, draw, image_size) -> None:
    model = _repaired(answer, draw, image_size, [CPU, CPU])
    images = draw.tensor(draw.integer(2, 4), 3, *image_size)
    logits = model(images)
    expect_type(logits, Tensor)
    if logits.dim() == 2 and len(logits) != len(images):
        raise Wrong("batch-mixed", expected=f"{len(images)} rows of logits", got=f"{len(logits)}")
    likely = {"classes-not-logits": logits.shape == images.shape[:1]}
    expect(tuple(logits.shape), (len(images), 10), what="the logits' shape", likely=likely)
    shapes, expected = [tuple(p.shape) for p in model.parameters()], _shapes(image_size)
    fixed = shapes[:2] + shapes[3:] == expected[:2] + expected[3:] and shapes[2] != expected[2]
    if shapes != expected:
        slug = "layer-changed"
        if fixed:  # by the image's size, or always the same?
            larger = _repaired(answer, draw, tuple(16 + pixels for pixels in image_size), [CPU] * 2)
            other = list(larger.parameters())[2].shape
            slug = "adaptive-pool" if tuple(other) == shapes[2] else "pooling-changed"
        raise Wrong(slug, expected=f"parameters of shapes {expected}", got=shapes)
    wanted = _logits(list(model.parameters()), images)
    likely = {"softmax-added": same(logits.sum(1), torch.ones(len(images))), "layer-changed": True}
    expect(logits, wanted, what="the logits", likely=likely)
    if not logits.requires_grad:
        raise Wrong("gradient-lost", expected="logits with a graph", got="none")
    logits.sum().backward()
    if any(parameter.grad is None for parameter in model.parameters()):
        expected = "a gradient for every parameter"
        raise Wrong("gradient-lost", expected=expected, got="none for some")
    single, likely = tuple(model(images[:1]).shape), {"batch-dropped": True}
    expect(single, (1, 10), what="the shape for one image", likely=likely)


@repairing.requires(
    "images of 16 x 16 pixels, from which pooling leaves 1024 numbers",
    # Rows of 4 numbers: the width that pooling leaves, so nothing was flattened.
    failures={**LOST_BATCH, "x4 and ": "no-flatten", "mat1 and mat2": "in-features-wrong"},
)
def images_of_16_x_16_pixels(answer, draw):
    _check_logits(answer, draw, (16, 16))


@repairing.requires(
    "other sizes", failures={**LOST_BATCH, "mat1 and mat2": "in-features-wrong"}, needs_earlier=True
)
def other_sizes(answer, draw):
    for size in (draw.choice([24, 28, 32]), draw.choice([19, 23, 25])):
        _check_logits(answer, draw, (size, size))


@repairing.requires(
    "height and width differ",
    failures={
        **LOST_BATCH,
        "mat1 and mat2": "square-only",
        "is invalid for input of size": "square-only",
    },
    needs_earlier=True,
)
def height_and_width_differ(answer, draw):
    for short, long in zip(draw.sample([12, 14, 18], 2), draw.sample([22, 27, 31], 2)):
        _check_logits(answer, draw, (short, long))
        _check_logits(answer, draw, (long, short))


@repairing.requires(
    "each part is on its device, and what passes is moved",
    failures={**LOST_BATCH, "x4 and ": "no-flatten", "mat1 and mat2": "in-features-wrong"},
    needs_earlier=True,
)
def each_part_is_on_its_device(answer, draw):
    moved = {p.device for p in _repaired(answer, draw, (16, 16), [META, META]).parameters()}
    for devices in ([CPU, META], [META, META]):
        model = _repaired(answer, draw, (16, 16), devices)
        places = [p.device for p in model.parameters()]
        if places != [devices[0]] * 4 + [devices[1]] * 4:
            slug = "nothing-placed" if moved == {CPU} else "wrong-part"
            raise Wrong(slug, expected=f"4 tensors on {devices[0]}, 4 on {devices[1]}", got=places)
        with watched_moves():
            logits = model(draw.tensor(draw.integer(2, 4), 3, 16, 16))
        if logits.device != devices[1]:
            raise Wrong("output-elsewhere", expected=f"on {devices[1]}", got=f"on {logits.device}")
