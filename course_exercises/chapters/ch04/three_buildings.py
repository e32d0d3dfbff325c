"""Exercise 4.1, `ThreeBuildings`: what it asks for, and how it is checked."""

import torch
from torch import Tensor, nn

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, same
from course_exercises.chapters.ch04.shared import (
    CPU,
    META,
    NO_SUCH_GPU,
    PLACES,
    watched_moves,
)

buildings = Exercise(
    "4.1",
    "ThreeBuildings",
    points=2,
    minutes=15,
    kind="first",
    parameters=("layers", "devices"),
    hints=[
        (
            "Two jobs: the constructor decides which layers go where, and `forward` carries the "
            "activations. Do the first with slices of the list."
        ),
        (
            "With 8 layers, the parts have 3, 3 and 2 layers: the quotient for everyone, and one more "
            "for as many parts as the remainder says."
        ),
        (
            "Keep the parts in an `nn.ModuleList`, move each with `.to(device)`. In `forward`, move "
            "what comes in before each part, also before the first. `.to` keeps the graph; "
            "nothing else is needed for backward."
        ),
    ],
    misconceptions={
        "not-a-module": "A plain list is no module: it cannot be moved or called, and `parameters()` does not look into "
        "it. Make each part an `nn.Sequential(*layers[a:b])`, with the star, and keep the parts as attributes or in "
        "an `nn.ModuleList`, which holds modules and cannot be called itself.",
        "not-the-chain": "The layers are not called as a chain: each once, in order, with what the one before returned. "
        "A part begins where the part before it ends, and what is left over after the division by three is part of "
        "the chain too.",
        "frozen-thawed": "A parameter that was frozen learns now, or the other way round. Cutting a model changes "
        "nothing of what its layers are.",
        "not-placed": "Layers are where they were, or their buffers are. Move each part as a module, `part.to(device)`, "
        "which takes parameters and buffers along, and in the constructor: an optimizer is built before the first "
        "`forward`.",
        "misplaced": "The parts are not on `devices[0]`, `devices[1]` and `devices[2]`, in this order and all three of "
        "them. Use what is in `devices`, whatever it is, and name no device of your own.",
        "uneven": "The parts differ by more than one layer. What is left over after the division by three is shared "
        "out, one layer more for a part.",
        **PLACES,
    },
    things="layers",
    failures={
        **NO_SUCH_GPU,
        "Cannot copy out of meta": "output-elsewhere",
        "before Module.__init__": "no-super",
        "'list' object": "not-a-module",
        "list is not a Module subclass": "not-a-module",
        'missing the required "forward"': "not-a-module",
    },
    at_home=True,
)


class _Station(nn.Module):
    """A layer with parameters and a buffer, that knows its number and notes its calls."""

    def __init__(self, number: int, width: int, diary: list[int]) -> None:
        super().__init__()
        self.number, self.diary = number, diary
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        self.diary.append(self.number)
        return torch.tanh(x @ self.weight) + self.shift


def _stations(draw, count: int) -> tuple[list[nn.Module], list[int], Tensor]:
    """The layers, the diary of their calls, and a batch for the first one."""
    torch.manual_seed(draw.seed())
    diary: list[int] = []
    inputs = draw.tensor(draw.integer(2, 5), draw.integer(3, 6))
    return [_Station(number, inputs.shape[1], diary) for number in range(count)], diary, inputs


def _awkward(draw) -> list[int]:
    """Numbers of layers that do not divide by three, with either remainder, in random order."""
    return draw.sample([3 * draw.integer(1, 4) + 1, 3 * draw.integer(1, 4) + 2], 2)


def _found(model: nn.Module, count: int) -> list[_Station]:
    """The stations inside a learner's model, in their order."""
    stations = {m.number: m for m in model.modules() if isinstance(m, _Station)}
    if not stations:
        raise Wrong("not-a-module", expected=f"{count} layers in the model", got="none")
    if len(stations) < count:
        raise Wrong("not-the-chain", expected=f"{count} layers", got=f"{len(stations)} of them")
    return [stations[number] for number in range(count)]


def _check_values(answer, draw, count: int, dtype: torch.dtype = torch.float32) -> None:
    layers, diary, inputs = _stations(draw, count)
    frozen = draw.integer(1, count - 1)
    layers[frozen].requires_grad_(False).eval()
    chain, inputs = nn.Sequential(*layers).to(dtype), inputs.to(dtype)
    weights = [layer.weight.detach().clone() for layer in layers]
    expected = chain(inputs)
    expected.square().sum().backward()
    gradients = [layer.weight.grad for layer in layers]
    chain.zero_grad()
    diary.clear()

    given = list(layers)
    model = answer(given, [CPU] * 3)
    output = model(inputs)
    expect_type(output, Tensor)
    if given != layers:
        raise Wrong("list-changed", expected=f"{count} layers in the list", got=len(given))
    if not same(output, expected) and diary != list(range(count)):
        raise Wrong("not-the-chain", expected=f"calls of {list(range(count))}", got=diary)
    likely = {"not-the-chain": output.dtype == dtype}
    expect(output, expected, what="the output", likely=likely)
    stations = _found(model, count)
    expect([s.weight for s in stations], weights, each="layer", what="the weights")
    others = [number != frozen for number in range(count)]
    learns, likely = [s.weight.requires_grad for s in stations], {"frozen-thawed": True}
    expect(learns, others, each="layer", what="requires_grad", likely=likely)
    modes, likely = [s.training for s in stations], {"mode-changed": True}
    expect(modes, others, each="layer", what="training", likely=likely)
    if not output.requires_grad:
        raise Wrong("cut-from-the-graph", expected="an output with a graph", got="none")
    output.square().sum().backward()
    got = [s.weight.grad for s in stations]
    cut = any(g is None for number, g in enumerate(got) if number != frozen)
    expect(got, gradients, each="layer", what="the gradient", likely={"cut-from-the-graph": cut})


@buildings.requires("three parts on one device give the chain's output and gradients")
def three_parts_on_one_device_give_the_chain(answer, draw):
    for count in (3, 3 * draw.integer(2, 4)):
        _check_values(answer, draw, count)
    _check_values(answer, draw, 3, torch.float64)


@buildings.requires("numbers of layers that do not divide by three")
def numbers_of_layers_that_do_not_divide(answer, draw):
    for count in (4, 5, *_awkward(draw)):
        _check_values(answer, draw, count)


def _places(answer, draw, count: int, devices) -> list[torch.device]:
    """The devices of the layers' parameters; their buffers must be there too."""
    layers, *_ = _stations(draw, count)
    stations = _found(answer(layers, devices), count)
    for station in stations:
        if station.shift.device != station.weight.device:
            got = f"the buffers on {station.shift.device}"
            raise Wrong("not-placed", expected=f"buffers on {station.weight.device}", got=got)
    return [station.weight.device for station in stations]


@buildings.requires(
    "part i is on devices[i]; no two parts differ by more than one layer", needs_earlier=True
)
def part_i_is_on_devices_i(answer, draw):
    for count in (3, *_awkward(draw)):
        # The meta device shows one border at a time: once behind part 0, once behind part 1.
        places = [_places(answer, draw, count, [CPU, *two]) for two in ([META] * 2, [CPU, META])]
        if not any(META in each for each in places):
            raise Wrong("not-placed", expected="the last part on the meta device", got="on cpu")
        ends = [each.count(CPU) for each in places]
        sizes = [ends[0], ends[1] - ends[0], count - ends[1]]
        in_order = [[CPU] * end + [META] * (count - end) for end in ends]
        if places != in_order or sizes[1] < 1:
            expected = "consecutive parts on devices 0, 1, 2"
            raise Wrong("misplaced", expected=expected, got=places[0])
        if max(sizes) - min(sizes) > 1:
            expected = f"{count} layers in parts that differ by one at most"
            raise Wrong("uneven", expected=expected, got=f"parts of {sizes}")


@buildings.requires(
    "activations move from part to part, and the output stays on the last device",
    needs_earlier=True,
)
def activations_move_from_part_to_part(answer, draw):
    for devices in ([CPU, CPU, META], [CPU, META, META], [META] * 3):
        layers, _, inputs = _stations(draw, draw.choice([4, 5, 7, 8]))
        model = answer(layers, devices)
        with watched_moves():
            output = model(inputs)
        if output.device != devices[-1]:
            raise Wrong("output-elsewhere", expected=f"on {devices[-1]}", got=f"on {output.device}")
