"""Exercise 4.1, `ThreeBuildings`: what it asks for, and how it is checked."""

import torch
from torch import Tensor, nn

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, same
from course_exercises.chapters.ch04.shared import CPU, META, NO_SUCH_GPU, watched_moves

buildings = Exercise(
    "4.1",
    "ThreeBuildings",
    points=2,
    minutes=25,
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
        "no-super": "Modules are registered by nn.Module's own constructor: call `super().__init__()` first.",
        "not-registered": "The parts are in a plain list, so `parameters()` does not find them: an "
        "optimizer would train nothing. Use `nn.ModuleList`.",
        "list-not-module": "A slice of `layers` is a plain list, which cannot be moved or called. "
        "Make a module of it, with the star: `nn.Sequential(*layers[a:b])`.",
        "container-called": "An `nn.ModuleList` only holds modules, it cannot be called. Call what is "
        "in it, one after the other, or make each part an `nn.Sequential`.",
        "result-dropped": "All layers are called, and the result of a part is not what the next one "
        "gets: `x = part(x)`, each time.",
        "layers-lost": "Some layers are never called. Where the number of layers does not divide by "
        "three, the rest has to go somewhere.",
        "layers-repeated": "A layer is called twice: where one part ends, the next begins.",
        "layers-out-of-order": "The layers are not called in their order: a part is a run of "
        "consecutive layers, and the parts follow each other.",
        "gradient-lost": "Backward does not reach the first layers. `detach`, `.data`, "
        "`torch.no_grad` and a new tensor made from the old one cut the graph; `.to` does not.",
        "frozen-thawed": "A parameter that was frozen learns now, or the other way round. Cutting a model "
        "changes nothing of what its layers are.",
        "devices-fixed": "You name devices of your own. Use those in `devices`, whatever they are.",
        "nothing-placed": "The layers are where they were: the constructor has to move each part to "
        "its device. In `forward` it is too late: an optimizer is built before the first batch.",
        "uneven": "The parts differ by more than one layer. What is left over after the division by "
        "three is shared out, one layer more for a part.",
        "devices-mixed-up": "The parts are not on the devices in their order: part i belongs on "
        "`devices[i]`.",
        "device-unused": "Two parts are on the device of one, so one of the three stays empty. Part i "
        "belongs on `devices[i]`, for all three.",
        "mode-changed": "A layer is in another mode than it came in, training or evaluation. Leave it "
        "as it is: cutting a model changes nothing of what its layers are.",
        "dtype-changed": "On the way your activations get another dtype than the layers have. Move the "
        "tensor to the device, and nothing else.",
        "list-changed": "Your constructor changes the list of layers that it was handed. The caller goes "
        "on with it: take slices.",
        "buffers-left": "A layer's parameters have moved and its buffers have not. Move the module, "
        "`layer.to(device)`: it takes both along.",
        "input-not-moved": "The inputs may come from any device: move them before the first part "
        "too.",
        "activation-not-moved": "The activations stay on the former device, and the next part's "
        "parameters are elsewhere. `x.to(device)` returns the moved tensor: use the result.",
        "output-elsewhere": "The output belongs on the last part's device: the loss is computed "
        "there, and a move back costs a transfer.",
    },
    failures={
        **NO_SUCH_GPU,
        "Cannot copy out of meta": "output-elsewhere",
        "before Module.__init__": "no-super",
        "'list' object": "list-not-module",
        "list is not a Module subclass": "list-not-module",
        'missing the required "forward"': "container-called",
        "same dtype": "dtype-changed",
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
        raise Wrong("not-registered", expected=f"{count} layers in the model", got="none")
    if len(stations) < count:
        raise Wrong("layers-lost", expected=f"{count} layers", got=f"{len(stations)} of them")
    return [stations[number] for number in range(count)]


def _check_values(answer, draw, count: int, double: bool = False) -> None:
    layers, diary, inputs = _stations(draw, count)
    frozen = draw.integer(1, count - 1)
    layers[frozen].requires_grad_(False).eval()
    given = list(layers)
    if double:
        inputs = inputs.double()
        for layer in layers:
            layer.double()
    weights = [layer.weight.detach().clone() for layer in layers]
    expected = nn.Sequential(*layers)(inputs)
    expected.square().sum().backward()
    gradients = [layer.weight.grad for layer in layers]
    for layer in layers:
        layer.weight.grad = None
    endings = [nn.Sequential(*layers[i:])(inputs) for i in range(1, count + 1)]
    diary.clear()

    model = answer(given, [CPU] * 3)
    output = model(inputs)
    expect_type(output, Tensor)
    if len(given) < count:
        raise Wrong("list-changed", expected=f"{count} layers in the list", got=f"{len(given)}")
    mistakes = {
        "layers-lost": len(set(diary)) < count,
        "layers-repeated": len(diary) > count,
        "layers-out-of-order": diary != sorted(diary),
        "result-dropped": lambda got: any(same(got, ending) for ending in endings),
    }
    expect(output, expected, what="the output", likely=mistakes)
    stations = _found(model, count)
    expect([s.weight for s in stations], weights, each="layer", what="the weights")
    learns = [s.weight.requires_grad for s in stations]
    expected = [number != frozen for number in range(count)]
    likely = {"frozen-thawed": True}
    expect(learns, expected, each="layer", what="requires_grad", likely=likely)
    modes, likely = [s.training for s in stations], {"mode-changed": True}
    expect(modes, expected, each="layer", what="training", likely=likely)
    if not output.requires_grad:
        raise Wrong("gradient-lost", expected="an output with a graph", got="none")
    output.square().sum().backward()
    got = [s.weight.grad for s in stations]
    cut = any(g is None for number, g in enumerate(got) if number != frozen)
    expect(got, gradients, each="layer", what="the gradient", likely={"gradient-lost": cut})


@buildings.requires("three parts on one device give the chain's output and gradients")
def three_parts_on_one_device_give_the_chain(answer, draw):
    for count in (3, 3 * draw.integer(2, 4)):
        _check_values(answer, draw, count)
    _check_values(answer, draw, 3, double=True)


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
            raise Wrong("buffers-left", expected=station.weight.device, got=station.shift.device)
    return [station.weight.device for station in stations]


@buildings.requires(
    "part i is on devices[i]; no two parts differ by more than one layer", needs_earlier=True
)
def part_i_is_on_devices_i(answer, draw):
    for count in (3, *_awkward(draw)):
        # The meta device shows one border at a time: once behind part 1, once behind part 0.
        first_two = _places(answer, draw, count, [CPU, CPU, META])
        first = _places(answer, draw, count, [CPU, META, META])
        if set(first_two + first) == {CPU}:
            raise Wrong("nothing-placed", expected="the last part on the meta device", got="on cpu")
        borders = first.count(CPU), first_two.count(CPU)
        in_order = [CPU] * borders[0] + [META] * (count - borders[0])
        in_order_too = [CPU] * borders[1] + [META] * (count - borders[1])
        if first != in_order or first_two != in_order_too or borders[0] > borders[1]:
            raise Wrong(
                "devices-mixed-up", expected="consecutive parts on devices 0, 1, 2", got=first
            )
        sizes = [borders[0], borders[1] - borders[0], count - borders[1]]
        if borders[0] == borders[1]:
            raise Wrong("device-unused", expected="layers on three devices", got="on two")
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
