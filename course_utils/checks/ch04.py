"""The checks of chapter 04: three devices, the cut between two ranks, the best cut, a repaired
model, and a table of three strategies.

Places are checked without a GPU: PyTorch's meta device is a second device on every machine. A
tensor there has no content, so values are checked on the CPU and places on [cpu, meta].
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from operator import index

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook

from course_utils.checks import Exercise, Wrong, expect, expect_type, run, same
from course_utils.checks.compare import TOLERANCE, show
from course_utils.checks.ranks import following
from course_utils.hardware import device
from course_utils.trace import kept_for_backward

CPU, META = torch.device("cpu"), torch.device("meta")

# What PyTorch says where code names a GPU that is not there.
NO_SUCH_GPU = dict.fromkeys(
    (
        "NVIDIA driver",
        "not compiled with CUDA",
        "device ordinal",
        "must be cuda device",
        "Invalid device string",
    ),
    "devices-fixed",
)


@contextlib.contextmanager
def _watched_moves() -> Iterator[None]:
    """Raises Wrong where a layer with parameters is called with inputs from another device.

    PyTorch itself does not always: a convolution of meta and CPU tensors runs.
    """
    worked = []

    def look(layer: nn.Module, inputs: tuple) -> None:
        own = next(layer.parameters(recurse=False), None)
        if own is None or not inputs or not isinstance(inputs[0], Tensor):
            return
        if inputs[0].device != own.device:
            slug = "activation-not-moved" if worked else "input-not-moved"
            raise Wrong(slug, expected=f"inputs on {own.device}", got=f"on {inputs[0].device}")
        worked.append(layer)

    handle = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()


# ---- 4.1 -----------------------------------------------------------------------------------------

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
def _(answer, draw):
    for count in (3, 3 * draw.integer(2, 4)):
        _check_values(answer, draw, count)
    _check_values(answer, draw, 3, double=True)


@buildings.requires("numbers of layers that do not divide by three")
def _(answer, draw):
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


@buildings.requires("part i is on devices[i]; no two parts differ by more than one layer")
def _(answer, draw):
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


@buildings.requires("activations move from part to part, and the output stays on the last device")
def _(answer, draw):
    for devices in ([CPU, CPU, META], [CPU, META, META], [META] * 3):
        layers, _, inputs = _stations(draw, draw.choice([4, 5, 7, 8]))
        model = answer(layers, devices)
        with _watched_moves():
            output = model(inputs)
        if output.device != devices[-1]:
            raise Wrong("output-elsewhere", expected=f"on {devices[-1]}", got=f"on {output.device}")


# ---- 4.2 -----------------------------------------------------------------------------------------

crossing = Exercise(
    "4.2",
    "hand_over",
    points=2,
    minutes=50,
    kind="core",
    parameters=("stage", "data", "room"),
    hints=[
        (
            "Write down first, for one tensor, who sends what to whom, in which order. Both ranks "
            "call the same function, and `dist.get_rank()` says which half to play."
        ),
        (
            "What rank 1 receives is a new beginning of a graph: a leaf that requires a gradient. "
            "After `loss.backward()` its `.grad` is what rank 0 waits for. `tensor.backward(gradient)` "
            "starts backward in the middle of a model."
        ),
        (
            "Rank 0: run the stage, send each tensor (detached, contiguous), receive a gradient for "
            "each floating-point tensor, and call `torch.autograd.backward(tensors, gradients)` once, "
            "for those that require one. Rank 1: receive all, make leaves, run the stage and backward, "
            "send each leaf's gradient, or zeros where there is none."
        ),
    ],
    misconceptions={
        "unanswered": "A rank waits for a message that the other never sends. Every send on one "
        "rank needs a recv on the other, in the same order.",
        "messages-differ": "A message and the place where it is received differ in dtype or in "
        "number of elements. Each tensor of `room` has the shape and dtype of its message.",
        "waits-too-early": "Rank 0 waits for a gradient before it has sent all tensors, and rank 1 "
        "computes no gradient before it has them all. First everything goes forward, then everything "
        "comes back.",
        "not-waited": "A message was started and nobody waited for it: its tensor may not be there "
        "yet, or not be sent. Keep what `isend` and `irecv` return, and call `wait()` on it.",
        "wrong-peer": "A rank plays the other's half, or talks to the wrong one. Rank 0 calls "
        "`stage(data)` and sends to rank 1; rank 1 receives from rank 0: `dst` and `src` are always "
        "the other's number.",
        "called-otherwise": "The last stage takes the tensors one by one and the targets behind them: "
        "`stage(*tensors, data)`, with the star.",
        "no-leaf": "There is no gradient to hand back. Either what arrived on rank 1 does not require "
        "one: call `requires_grad_()` before the stage runs. Or `loss.backward()` has not run yet.",
        "first-stage-left": "Backward ends on rank 1: the parameters of rank 0's stage have no "
        "gradient. Receive what comes back and run it through the stage.",
        "own-gradient": "Rank 0 begins its backward with ones, as if the sum of the activations were "
        "the loss. Begin with the gradient that rank 1 sends.",
        "activations-returned": "Rank 1 sends the activations back. Rank 0 needs their gradient.",
        "order-swapped": "The gradients reach the wrong tensors: send them back in the order of the "
        "list, the order in which they are received.",
        "one-tensor-only": "Only one tensor of the list is handed over and back, or only one gradient "
        "is used.",
        "last-stage-left": "The parameters of rank 1's stage have no gradient: call "
        "`loss.backward()` there.",
        "loss-not-returned": "Rank 1 has to return the loss.",
        "graph-twice": "You run backward once for each tensor, and the tensors share a part of the "
        "graph, which the first pass frees. Run one pass for all: "
        "`torch.autograd.backward(tensors, gradients)`.",
        "tuple-not-tensor": "`stage(data)` returns a tuple, also where only one tensor crosses. Go "
        "through it, tensor by tensor.",
        "not-contiguous": "A message has to be contiguous in memory, and so has the room for it. Send "
        "`tensor.contiguous()`, and receive into `room`: `empty_like` copies the order in memory too.",
        "float32-only": "The model's activations are not always float32. Send and receive, there and "
        "back, in the dtype that `room` shows.",
        "room-is-leaf": "Your leaf is the tensor of `room` itself. In the next step it comes again, with "
        "the `.grad` of this one in it, and you hand back the sum of both. Make the leaf with "
        "`tensor.detach().requires_grad_()`.",
        "zeros-for-none": "A parameter that the loss does not use has a gradient of zeros. As after "
        "`loss.backward()` it must be None: weight decay and momentum would move the parameter.",
        "forward-twice": "A stage runs its forward pass more than once in a step. Keep the tensors, with "
        "their graph, until the gradients come back.",
        "loss-not-a-float": "Return the loss as a number of Python's: `loss.item()`.",
        "rank-0-returns": "Rank 0 has no loss: the function returns None there.",
        "divided": "Your gradients are too small by the number of tensors that cross. The loss has a "
        "gradient for each of them: begin backward with the loss itself.",
        "order-turned": "Both your ranks go through the list in another order, and so they agree with each "
        "other and with nobody else. Send in the order of the list, there and back.",
        "not-as-asked": "What is sent is not what the rules say: each tensor of the list as it is, then "
        "for each floating-point one its gradient, of the same shape and dtype.",
        "mode-changed": "A stage is in another mode than it came in, training or evaluation. Leave it as "
        "it is.",
        "integer-leaf": "An integer tensor has no gradient: require one of floating-point tensors "
        "only, hand nothing back for the others, and leave them out of rank 0's backward.",
        "unused-tensor": "The loss has not used this tensor, so its `.grad` is None. Rank 0 waits "
        "for a message all the same: send zeros.",
        "constant-tensor": "One of the tensors that cross needs no gradient on rank 0: there is no "
        "graph behind it. Receive its gradient, and leave it out of backward.",
        "gradients-replaced": "A second step has replaced the gradients. Backward adds to `.grad`; "
        "clearing it is the caller's job.",
    },
    failures={
        "timeout": "unanswered",
        "mismatch": "messages-differ",
        "a second time": "graph-twice",
        "be contiguous": "not-contiguous",
        "'tuple'": "tuple-not-tensor",
        "then the targets": "called-otherwise",
        "same as the rank of the current process": "wrong-peer",
        "names itself": "wrong-peer",
        "there is no rank": "wrong-peer",
        "the targets alone": "wrong-peer",
        "only for scalar outputs": "own-gradient",
    },
)


@dataclass(frozen=True)
class _Cut:
    """A model that is cut in two: what crosses, its dtype, and its sizes, no two of them equal."""

    kind: str
    seed: int
    rows: int
    width: int
    outputs: int
    dtype: torch.dtype = torch.float32

    def make(self) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
        """The two stages, the inputs and the targets, on this process's device."""
        torch.manual_seed(self.seed)
        tensors = torch.randn(self.rows, self.width), torch.randn(self.rows, self.outputs)
        stages = _First(self), _Last(self)
        place = {"device": device(), "dtype": self.dtype}
        return *(stage.to(**place) for stage in stages), *(tensor.to(**place) for tensor in tensors)


class _First(nn.Module):
    """A first stage."""

    def __init__(self, cut: _Cut) -> None:
        super().__init__()
        self.kind = cut.kind
        self.inner, self.left, self.right = (nn.Linear(cut.width, cut.width) for _ in range(3))
        self.idle = nn.Linear(2, 2) if cut.kind == "unused" else None
        self.calls = 0

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        hidden = torch.tanh(self.inner(inputs))
        if self.kind == "one":
            return (self.right(self.left(hidden)),)
        if self.kind == "turned":
            return (self.right(self.left(hidden)).T,)
        numbers = torch.arange(len(inputs), device=inputs.device)
        extra = {
            "two": (),
            "numbers": (numbers,),
            "unused": (hidden.exp(),),
            "constant": (inputs.detach().abs(),),
        }[self.kind]
        return self.left(hidden), *extra, self.right(hidden)


class _Last(nn.Module):
    """A last stage: its loss tells the tensors apart. It does not use the tensor `unused`."""

    def __init__(self, cut: _Cut) -> None:
        super().__init__()
        self.kind = cut.kind
        self.outer = nn.Linear(cut.width, cut.outputs)
        self.idle = nn.Linear(2, 2) if cut.kind == "unused" else None
        self.calls = 0
        self.crossing = {"one": 1, "turned": 1, "two": 2}.get(cut.kind, 3)
        self.targets = cut.rows, cut.outputs

    def forward(self, *tensors: Tensor) -> Tensor:
        self.calls += 1
        *arrived, targets = tensors
        if not arrived and targets.shape == self.targets:
            raise TypeError("this is the last stage, and it got the targets alone")
        one_by_one = len(arrived) == self.crossing and all(map(torch.is_tensor, arrived))
        if not one_by_one or targets.shape != self.targets:
            raise TypeError(f"this stage takes {self.crossing} of the tensors, then the targets")
        if self.kind == "turned":
            arrived = [arrived[0].T]
        total = arrived[0] + arrived[-1].square()
        if self.kind == "numbers":
            total = total * arrived[1].unsqueeze(1)
        if self.kind == "constant":
            total = total * arrived[1]
        return functional.mse_loss(self.outer(torch.sin(total)), targets)


@dataclass(frozen=True)
class _Crossed:
    returned: object
    gradients: dict[str, Tensor | None]
    unwaited: list[str]  # messages that nobody waited for
    calls: int  # forward passes of the rank's stage
    sent: list[Tensor]  # the messages of the first step
    modes: list[bool]  # whether the parts of the stage are in training afterwards


def _gradients(stage: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.detach().cpu()
        for name, p in stage.named_parameters()
    }


def _crossed(rank, answer, cut: _Cut, steps: int) -> _Crossed:
    first, last, inputs, targets = cut.make()
    with torch.no_grad():
        shapes = first(inputs)
    stage, data = (first, inputs) if rank == 0 else (last, targets)
    stage.calls, returned, unwaited, messages = 0, None, [], []
    next(iter(stage.children())).eval()  # a part that is frozen, say
    room = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in shapes]
    for _ in range(steps):  # with the same room, as a training loop has it
        with following() as sent:
            returned = answer(stage, data, room)
            if not messages:
                payloads = [call.payload[0] for call in sent.calls if call.kind == "send"]
                messages = [payload.detach().cpu().clone() for payload in payloads]
        unwaited += sent.unwaited
    modes = [part.training for part in stage.children()]
    return _Crossed(returned, _gradients(stage), unwaited, stage.calls, messages, modes)


def _whole(cut: _Cut, begin=None) -> tuple[float, dict, dict]:
    """Loss and gradients of the model that is not cut. `begin` says with which gradients a
    mistaken rank 0 begins: a function of the tensors that cross and of their gradients."""
    first, last, inputs, targets = cut.make()
    tensors = first(inputs)
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    loss = last(*leaves, targets)
    loss.backward()
    gradients = [leaf.grad for leaf in leaves]
    pairs = [
        (tensor, gradient)
        for tensor, gradient in zip(tensors, begin(leaves, gradients) if begin else gradients)
        if tensor.requires_grad and gradient is not None
    ]
    torch.autograd.backward(*zip(*pairs))
    return loss.item(), _gradients(first), _gradients(last)


def _messages(cut: _Cut) -> tuple[list[Tensor], list[Tensor]]:
    """What rank 0 sends, and what rank 1 sends back."""
    first, last, inputs, targets = cut.make()
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in first(inputs)]
    last(*leaves, targets).backward()
    floating = [leaf for leaf in leaves if leaf.is_floating_point()]
    back = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in floating]
    return [leaf.detach().cpu() for leaf in leaves], [gradient.cpu() for gradient in back]


def _check_messages(zero: _Crossed, one: _Crossed, cut: _Cut, tolerance: float) -> None:
    """What crossed must be what the rules say, also where the ranks agree on something else."""
    for rank, (report, expected) in enumerate(zip((zero, one), _messages(cut))):
        likely = {"order-turned": expected[::-1], "not-as-asked": True}
        what = f"what rank {rank} sends"
        expect(report.sent, expected, each="message", what=what, likely=likely, tolerance=tolerance)


def _scaled(gradients: dict, factor: float) -> dict:
    return {name: None if g is None else factor * g for name, g in gradients.items()}


def _zeros_for_none(got: dict, expected: dict) -> bool:
    return any(got[name] is not None and g is None for name, g in expected.items())


def _check_crossing(answer, draw, kind, dtype=torch.float32, steps=1) -> None:
    cut = _Cut(kind, draw.seed(), *draw.sample(range(2, 8), 3), dtype)
    zero, one = run(_crossed, 2, answer, cut, steps)
    for rank, unwaited in enumerate((zero.unwaited, one.unwaited)):
        if unwaited:
            got = f"on rank {rank} nobody waits for a {unwaited[0]}"
            raise Wrong("not-waited", expected="a wait() for every message", got=got)
    loss, first, last = _whole(cut)

    def first_with(begin) -> Callable[[object], bool]:
        return lambda got: same(got, _whole(cut, begin)[1])

    only_first = first_with(lambda t, g: [g[0]] + [None] * (len(g) - 1))
    only_last = first_with(lambda t, g: [None] * (len(g) - 1) + [g[-1]])

    def times(gradients: dict) -> dict:
        return _scaled(gradients, steps)

    double = dtype == torch.float64  # where a detour through float32 would be seen
    tolerance = 1e-10 if double else TOLERANCE
    floating = [g for g in one.gradients.values() if g is not None]
    expect(
        one.gradients,
        times(last),
        what="gradients on rank 1",
        tolerance=tolerance,
        likely={
            "zeros-for-none": lambda got: _zeros_for_none(got, last),
            "float32-only": lambda got: double and same(got, times(last)),
            "last-stage-left": not floating,
            "gradients-replaced": steps > 1 and last,
            "divided": lambda got: (
                len(one.sent) > 1 and same(got, _scaled(last, 1 / len(one.sent)))
            ),
            "one-tensor-only": kind == "two",
        },
    )
    none = [name for name, g in zero.gradients.items() if g is None]
    silent = all(g is None or not g.any() for g in zero.gradients.values())
    expect(
        zero.gradients,
        times(first),
        what="gradients on rank 0",
        tolerance=tolerance,
        likely={
            "zeros-for-none": lambda got: _zeros_for_none(got, first),
            "float32-only": lambda got: double and same(got, times(first)),
            # in the second step twice the gradient: 3 where 2 are right
            "room-is-leaf": lambda got: steps == 2 and same(got, _scaled(first, 3)),
            "first-stage-left": len(none) == len(first),
            "no-leaf": silent,
            "gradients-replaced": steps > 1 and first,
            "own-gradient": first_with(lambda t, g: [torch.ones_like(x) for x in t]),
            "activations-returned": first_with(lambda t, g: [x.detach() for x in t]),
            "order-swapped": first_with(lambda t, g: g[::-1]),
            "one-tensor-only": lambda got: only_first(got) or only_last(got),
        },
    )
    expect(one.returned, loss, what="rank 1's loss", likely={"loss-not-returned": True})
    expect_type(one.returned, float, likely="loss-not-a-float")
    expect(zero.returned, None, what="what rank 0 returns", likely={"rank-0-returns": True})
    for rank, report in enumerate((zero, one)):
        what = f"forward passes of rank {rank}'s stage"
        expect(report.calls, steps, what=what, likely={"forward-twice": True})
        modes, likely = [False] + [True] * (len(report.modes) - 1), {"mode-changed": True}
        expect(report.modes, modes, what=f"training, on rank {rank}", likely=likely)
    _check_messages(zero, one, cut, tolerance)


@crossing.requires(
    "one tensor crosses: both stages get the whole model's gradients",
    failures={"'NoneType'": "no-leaf", "does not require grad": "no-leaf"},
)
def _(answer, draw):
    _check_crossing(answer, draw, "one")


@crossing.requires(
    "two tensors cross that share a part of the graph",
    failures={"finished without": "unanswered", "timeout": "waits-too-early"},
)
def _(answer, draw):
    _check_crossing(answer, draw, "two")


@crossing.requires(
    "gradients add up over two steps, in float64", failures={"mismatch": "float32-only"}
)
def _(answer, draw):
    _check_crossing(answer, draw, "two", torch.float64, steps=2)


@crossing.requires("a tensor that is not contiguous")
def _(answer, draw):
    _check_crossing(answer, draw, "turned")


@crossing.requires(
    "an integer tensor between two others",
    failures=dict.fromkeys(
        ("floating point", "'NoneType'", "does not require grad"), "integer-leaf"
    ),
)
def _(answer, draw):
    _check_crossing(answer, draw, "numbers")


@crossing.requires(
    "a tensor that the loss does not use",
    failures={"'NoneType'": "unused-tensor", "timeout": "unused-tensor"},
)
def _(answer, draw):
    _check_crossing(answer, draw, "unused")


@crossing.requires(
    "a floating-point tensor without a graph behind it",
    failures={
        "does not require grad": "constant-tensor",
        "timeout": "constant-tensor",
        "mismatch": "constant-tensor",
    },
)
def _(answer, draw):
    _check_crossing(answer, draw, "constant")


# ---- 4.3 -----------------------------------------------------------------------------------------

cutting = Exercise(
    "4.3",
    "balanced_cuts",
    points=3,
    minutes=35,
    kind="core",
    parameters=("costs", "stages"),
    hints=[
        (
            "Think of the last stage alone. If it begins at layer c, what is the best that the layers "
            "before c can do in one stage fewer?"
        ),
        (
            "That is a smaller problem of the same kind, and the same small problems come back again "
            "and again: solve each one once. With prefix sums, the cost of any run of layers is one "
            "subtraction."
        ),
        (
            "Fill a table. Entry (s, i) is the least slowest stage for the first i layers in s stages. "
            "It is the minimum over c of the larger of entry (s - 1, c) and the cost of layers c to "
            "i - 1. Keep the c of each minimum and walk back from the end."
        ),
    ],
    misconceptions={
        "sizes-not-cuts": "You return how many layers each stage has. Asked is where to cut.",
        "stages-not-cuts": "You return the stages themselves. Asked is where to cut: the indices of "
        "the layers before which a stage ends.",
        "cost-not-cuts": "You return how slow the slowest stage is. Asked is where to cut: remember, "
        "with each best cost, the cuts that lead to it.",
        "unhashable": "`cache` looks its results up by the arguments, and a list cannot be looked up. "
        "Cache a function inside yours: its arguments are whole numbers, and it sees `costs`.",
        "ends-included": "The beginning and the end of the chain are no cuts: stages - 1 indices "
        "suffice.",
        "number-of-cuts": "That many cuts do not make that many stages. Every stage has to have at "
        "least one layer, also where a stage fewer would be as fast.",
        "empty-stage": "Cuts are in ascending order, each of them once, from 1 to the number of layers "
        "- 1: every stage has at least one layer.",
        "cut-after": "Your cuts are one too small: a cut c stands before layer c, so that "
        "costs[:c] is the first stage of one cut.",
        "equal-layers": "You cut into stages with equally many layers. Layers cost differently.",
        "stops-early": "You fill each stage until the next layer would exceed an equal share. What "
        "each stage leaves over piles up in the last one.",
        "stops-late": "You fill each stage until it has reached an equal share. The stages come out "
        "too large, each by a part of a layer.",
        "nearest-share": "You cut where the running total is nearest to equal shares. A cut that is "
        "best by itself need not be best with its neighbours.",
        "share-of-the-rest": "You give each stage its share of what is left. That looks one stage "
        "ahead; the best cut needs all of them.",
        "halved": "You cut in halves, and the halves again. The best halves do not always have "
        "the best quarters.",
        "spread-not-slowest": "You make the stages as equal as possible in the mean (the least "
        "variance). Asked is the least slowest stage.",
        "sorted": "You sort the costs. The layers are a chain: their order is fixed.",
        "not-best": "There is a cut whose slowest stage is faster.",
        "fractions": "With whole numbers your cuts are right. Costs may be fractions: a search for "
        "the limit has to try the sums that occur, not whole numbers.",
        "too-coarse": "Your cuts are right for large costs and wrong for small ones, such as seconds of "
        "0.00001: a search that ends at a fixed width, or rounded costs, cannot tell them apart. Try "
        "the sums that occur.",
        "costs-changed": "Your function changes the caller's list.",
        "too-slow": "This tries too many cuts. Solve each smaller problem once and remember it.",
        "refuses-too-much": "You refuse what can be done: as many stages as layers, or a single one, are "
        "allowed.",
        "not-refused": "More stages than layers, or fewer than one: raise ValueError.",
        "other-error": "Asked is a ValueError with a message, raised on purpose.",
        "accident": "This ValueError comes from deep inside by accident, and its message tells the "
        "caller nothing. Test `stages` first.",
    },
    failures={
        "endless": "too-slow",
        "RecursionError": "too-slow",
        "unhashable type": "unhashable",
    },
)

Cuts = list[int]


def _loads(costs: list[float], cuts: Cuts) -> list[float]:
    """The cost of each stage."""
    return [sum(costs[a:b]) for a, b in pairwise([0, *cuts, len(costs)])]


def best_cuts(costs: list[float], stages: int, join: Callable = max) -> Cuts:
    """The cuts that minimise the slowest stage. `join(load, rest)` adds a stage's load to the
    measure of the stages behind it; another `join` minimises another measure."""
    total, layers = [0, *accumulate(costs)], len(costs)
    tails: dict[int, tuple] = {layers: (0, ())}  # first layer: the measure and the stages' ends
    for _ in range(stages):
        tails = {
            start: min(
                (join(total[end] - total[start], measure), (end, *ends))
                for end, (measure, ends) in tails.items()
                if end > start
            )
            for start in range(layers)
            if start < max(tails)
        }
    return list(tails[0][1][:-1])


# Mistaken partitioners. `MISLEADING` holds lists that mislead all of them.


def _equal_layers(costs: list[float], stages: int) -> Cuts:
    size, longer = divmod(len(costs), stages)
    return [i * size + min(i, longer) for i in range(1, stages)]


def _filled(costs: list[float], stages: int, early: bool) -> Cuts:
    """A stage ends before (early) or after the layer with which it passes its equal share."""
    share, cuts, load = sum(costs) / stages, [], 0
    for i, cost in enumerate(costs):
        full = load + cost > share if early else load >= share
        needed = len(costs) - i == stages - 1 - len(cuts)
        if i > (cuts or [0])[-1] and len(cuts) < stages - 1 and (full or needed):
            cuts.append(i)
            load = 0
        load += cost
    return cuts


def _nearest_share(costs: list[float], stages: int) -> Cuts:
    total, cuts = [0, *accumulate(costs)], [0]
    for stage in range(1, stages):
        where = range(cuts[-1] + 1, len(costs) - (stages - 1 - stage))
        cuts.append(min(where, key=lambda i: abs(total[i] - stage * total[-1] / stages)))
    return cuts[1:]


def _share_of_the_rest(costs: list[float], stages: int) -> Cuts:
    cuts, start = [], 0
    for left in range(stages, 1, -1):
        share, load, end = sum(costs[start:]) / left, costs[start], start + 1
        while len(costs) - end > left - 1 and load + costs[end] <= share:
            load, end = load + costs[end], end + 1
        cuts.append(end)
        start = end
    return cuts


def _halved(costs: list[float], stages: int) -> Cuts:
    if stages == 1:
        return []
    first = stages // 2
    second = stages - first
    cut = min(
        range(first, len(costs) - second + 1),
        key=lambda c: max(sum(costs[:c]) / first, sum(costs[c:]) / second),
    )
    return [*_halved(costs[:cut], first), cut, *(cut + c for c in _halved(costs[cut:], second))]


MISTAKEN: dict[str, Callable[[list[float], int], Cuts]] = {
    "equal-layers": _equal_layers,
    "stops-early": partial(_filled, early=True),
    "stops-late": partial(_filled, early=False),
    "nearest-share": _nearest_share,
    "share-of-the-rest": _share_of_the_rest,
    "halved": _halved,
    "spread-not-slowest": partial(best_cuts, join=lambda load, rest: load**2 + rest),
    "sorted": lambda costs, stages: best_cuts(sorted(costs, reverse=True), stages),
}

# Found by a search; tests/test_checks_ch04.py shows that each mistaken partitioner misses the best
# cut of each list, and that no two of them give the same cuts, from whichever end they work.
MISLEADING = [
    ([8, 4, 2, 3, 5, 6, 9, 7, 2, 1, 6], 5),
    ([5, 7, 1, 9, 4, 7, 3, 1, 3, 9, 1, 2, 1], 6),
    ([9, 1, 8, 7, 1, 7, 2, 7, 7, 8, 6, 3], 5),
    ([8, 2, 1, 4, 1, 8, 6, 8, 1, 3, 5, 1, 4], 5),
    ([3, 7, 1, 5, 8, 7, 5, 7, 9, 2, 3], 6),
    ([5, 5, 2, 2, 5, 5, 8, 6, 3, 4], 5),
    ([1, 9, 5, 1, 6, 3, 5, 3, 1, 3, 1, 3], 6),
    ([8, 1, 7, 8, 8, 6, 2, 3, 9, 6], 6),
]


def _mirrored(partition: Callable, costs: list[float], stages: int) -> Cuts:
    """What a partitioner does that works from the last layer to the first."""
    return [len(costs) - cut for cut in reversed(partition(costs[::-1], stages))]


def _cuts_of(answer, costs: list[float], stages: int) -> Cuts:
    """The answer's cuts, which must be cuts: Wrong says what else they are."""
    given = list(costs)
    got = answer(given, stages)
    if given != costs:
        raise Wrong("costs-changed", expected=costs, got=given)
    if isinstance(got, int | float):
        raise Wrong("cost-not-cuts", expected="a list of cuts", got=got)
    expect_type(got, (list, tuple))
    try:
        cuts = [index(cut) for cut in got]
    except TypeError:
        lists = [isinstance(entry, list | tuple) for entry in got]
        slug = "stages-not-cuts" if all(lists) else "cost-not-cuts" if any(lists) else None
        raise Wrong(slug, expected="a list of whole numbers", got=got) from None
    layers, what = len(costs), f"{stages - 1} cuts of {len(costs)} layers"
    if len(cuts) != stages - 1:
        ends = [cut for cut in cuts if cut in (0, layers)]
        mistakes = {
            "sizes-not-cuts": len(cuts) == stages and sum(cuts) == layers,
            "ends-included": bool(ends) and len(cuts) - len(ends) == stages - 1,
        }
        slug = next((slug for slug, made in mistakes.items() if made), "number-of-cuts")
        raise Wrong(slug, expected=what, got=got)
    if any(a >= b for a, b in pairwise([0, *cuts, layers])):
        after = [cut + 1 for cut in cuts] == best_cuts(costs, stages)
        raise Wrong("cut-after" if after else "empty-stage", expected=what, got=got)
    return cuts


def _must_be_best(got: Cuts, costs: list[float], stages: int, likely: str) -> None:
    slowest, best = max(_loads(costs, got)), max(_loads(costs, best_cuts(costs, stages)))
    if slowest > best * (1 + 1e-9):
        chain = costs if len(costs) <= 20 else f"{len(costs)} layers"
        raise Wrong(
            likely,
            expected=f"slowest stage {best:g} of {chain} in {stages} stages",
            got=f"{slowest:g} with cuts {got}",
        )


@cutting.requires("layers that cost the same")
def _(answer, draw):
    cost = draw.integer(2, 9)
    for stages in draw.sample(range(2, 6), 3):
        size = draw.integer(2, 4)
        costs = [cost] * (size * stages)
        got, best = _cuts_of(answer, costs, stages), best_cuts(costs, stages)
        after = got == [cut - 1 for cut in best]
        _must_be_best(got, costs, stages, "cut-after" if after else "not-best")


@cutting.requires("layers of different costs, on which simple rules fail")
def _(answer, draw):
    lists = [
        ([factor * cost for cost in costs], stages)
        for costs, stages in draw.sample(MISLEADING, 3)
        for factor in [draw.integer(1, 9)]
    ]
    got = [_cuts_of(answer, costs, stages) for costs, stages in lists]
    likely = "not-best"
    for slug, partition in MISTAKEN.items():
        for rule in (partition, partial(_mirrored, partition)):
            if got == [rule(costs, stages) for costs, stages in lists]:
                likely = slug
    for cuts, (costs, stages) in zip(got, lists):
        _must_be_best(cuts, costs, stages, likely)


@cutting.requires(
    "one stage; as many stages as layers; layers that cost nothing",
    failures={"ValueError": "refuses-too-much", "AssertionError": "refuses-too-much"},
)
def _(answer, draw):
    count = draw.integer(3, 7)
    costs = [draw.integer(1, 20) for _ in range(count)]
    expect(_cuts_of(answer, costs, 1), [], what="the cuts for one stage")
    expect(_cuts_of(answer, costs, count), list(range(1, count)), what="the cuts of single layers")
    cost = draw.integer(1, 9)
    free = [0] * count
    for costs, stages in (([0, 0, cost, *free, cost, 0], 3), ([cost, *free], 3), (free, 2)):
        _must_be_best(_cuts_of(answer, costs, stages), costs, stages, "not-best")


@cutting.requires(
    "many random lists, of whole numbers and of fractions",
    failures={"cannot be interpreted as an integer": "fractions"},
)
def _(answer, draw):
    for unit, likely in ((1, "not-best"), (2**-8, "fractions"), (2**-23, "too-coarse")):
        for _ in range(12):
            costs = [unit * draw.integer(0, 99) for _ in range(draw.integer(6, 11))]
            stages = draw.integer(2, 5)
            _must_be_best(_cuts_of(answer, costs, stages), costs, stages, likely)


@cutting.requires("96 layers in 12 stages, in seconds", seconds=5)
def _(answer, draw):
    costs = [draw.integer(1, 1000) for _ in range(96)]
    _must_be_best(_cuts_of(answer, costs, 12), costs, 12, "not-best")


@cutting.requires("stages that cannot be filled are refused")
def _(answer, draw):
    layers = draw.integer(2, 6)
    too_many = (layers, layers + 1), (layers, layers + draw.integer(2, 5))
    for count, stages in (*too_many, (layers, 0), (layers, -1), (0, 1)):
        expected = f"ValueError for {stages} stages of {count} layers"
        try:
            got = answer([draw.integer(1, 9) for _ in range(count)], stages)
        except ValueError as error:
            message = str(error)
            by_accident = ("arg is an empty", "iterable argument is empty", "unpack", "not in list")
            if not message or any(part in message for part in by_accident):
                raise Wrong("accident", expected=expected, got=f"ValueError({message!r})") from None
        except Exception as error:  # noqa: BLE001 - any other error is the wrong one
            got = f"{type(error).__name__}: {error}"
            raise Wrong("other-error", expected=expected, got=got) from None
        else:
            raise Wrong("not-refused", expected=expected, got=got)


# ---- 4.4 -----------------------------------------------------------------------------------------

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
def _(answer, draw):
    _check_logits(answer, draw, (16, 16))


@repairing.requires("other sizes", failures={**LOST_BATCH, "mat1 and mat2": "in-features-wrong"})
def _(answer, draw):
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
def _(answer, draw):
    for short, long in zip(draw.sample([12, 14, 18], 2), draw.sample([22, 27, 31], 2)):
        _check_logits(answer, draw, (short, long))
        _check_logits(answer, draw, (long, short))


@repairing.requires(
    "each part is on its device, and what passes is moved",
    failures={**LOST_BATCH, "x4 and ": "no-flatten", "mat1 and mat2": "in-features-wrong"},
)
def _(answer, draw):
    moved = {p.device for p in _repaired(answer, draw, (16, 16), [META, META]).parameters()}
    for devices in ([CPU, META], [META, META]):
        model = _repaired(answer, draw, (16, 16), devices)
        places = [p.device for p in model.parameters()]
        if places != [devices[0]] * 4 + [devices[1]] * 4:
            slug = "nothing-placed" if moved == {CPU} else "wrong-part"
            raise Wrong(slug, expected=f"4 tensors on {devices[0]}, 4 on {devices[1]}", got=places)
        with _watched_moves():
            logits = model(draw.tensor(draw.integer(2, 4), 3, 16, 16))
        if logits.device != devices[1]:
            raise Wrong("output-elsewhere", expected=f"on {devices[1]}", got=f"on {logits.device}")


# ---- 4.5 -----------------------------------------------------------------------------------------

comparing = Exercise(
    "4.5",
    "compare_cuts",
    points=3,
    minutes=40,
    kind="stretch",
    parameters=("layers", "inputs", "seconds", "stages", "cut"),
    hints=[
        (
            "Separate three things: where a strategy cuts, what a stage holds, and the row that is "
            "made of both. The row is the same function for all strategies."
        ),
        (
            "`nn.Sequential` can be sliced: `layers[2:5]` is a stage. Its memory is a sum over its own "
            "`parameters()` and `buffers()`, with a gradient for each parameter that requires one, "
            "plus what `kept_for_backward` counts."
        ),
        (
            "Go through the stages in order. Inside `with kept_for_backward(stage)`, run the stage on "
            "what arrives; what arrives at the next one is the output, detached, and it requires a "
            "gradient if it is floating point. `nbytes` knows each dtype. Idle is 1 minus the seconds "
            "of all stages over stages times slowest."
        ),
    ],
    misconceptions={
        "rows-missing": "The table has one row for each of the three strategies, under its name, and "
        "each row has the four entries of the docstring.",
        "remainder-last": "Equal layers: where the number does not divide, the first stages have one "
        "layer more each. You leave the whole rest to one stage.",
        "shares-rounded": "You round i * n / s. Then the longer stages stand anywhere; asked is that the "
        "first n % s stages have one layer more each.",
        "cut-of-ones": "Equal layers: `cut` looks at the slowest stage alone, so for equal costs it "
        "may leave one stage short. Asked are the cuts of `torch.tensor_split`: the first stages "
        "have one layer more each.",
        "ends-included": "The beginning and the end of the line are no cuts: the form of exercise 4.3 "
        "has stages - 1 indices.",
        "not-equal-layers": "With n layers in s stages, the first n % s stages have n // s + 1 layers "
        "and the others n // s. A cut is the index of the first layer behind it.",
        "not-what-cut-returns": "This row's cuts are what `cut` returns for the costs of its strategy: "
        "one cost for each layer, handed over as they are.",
        "seconds-otherwise": "Cut the list of seconds as the layers are cut, add up each piece, and "
        "take the largest sum.",
        "idle-otherwise": "In `stages * slowest` seconds all stages together work `sum(seconds)`. What "
        "is left, as a share of the first, is idle.",
        "bytes-otherwise": "Look at one stage alone: bytes of its parameters, of their gradients, of "
        "its buffers, and what it keeps for backward of the batch that arrives there.",
        "same-cuts": "Another strategy's cuts stand in this row.",
        "bytes-not-numbers": "You hand `cut` the bytes of the layers. Asked is by the number of "
        "parameters, `numel()`, whatever their dtype.",
        "rounded": "You round. Return the number as it is.",
        "training-mode": "You measure, or leave the layers, in training mode. A frozen BatchNorm is in "
        "evaluation mode and keeps less: leave each layer in its mode.",
        "trainable-only": "You count the parameters that learn. A frozen one is held and computed "
        "with like any other: count it too.",
        "sum-not-slowest": "The slowest stage is the largest sum, not the sum of all.",
        "mean-not-slowest": "The slowest stage is the largest, not the mean.",
        "index-not-seconds": "You say which stage is the slowest. Asked are its seconds.",
        "slowest-layer": "A stage's seconds are the sum over its layers; you look at single layers.",
        "costs-not-seconds": "The slowest stage is in seconds for each strategy, whatever the strategy "
        "balances.",
        "idle-one-batch": "1 - 1/stages is the idle share when one batch goes through alone. Here "
        "batches follow each other: a stage works its own seconds in every `slowest` seconds.",
        "one-number": "Asked is one number for the whole line, not one for each stage.",
        "idle-of-one-stage": "That is the idle share of the stage with the least work. Asked is that "
        "of all stages together.",
        "idle-not-share": "Idle is a share from 0 to 1, of the time of all stages.",
        "busy-not-idle": "That is the share of time in which stages work. Idle is the rest.",
        "gradients-forgotten": "A parameter that learns takes its bytes twice: once itself, once as "
        "its gradient.",
        "activations-forgotten": "What the forward pass keeps for backward is memory too: use "
        "`kept_for_backward`.",
        "inputs-not-handed-on": "A stage gets what the stage before it returns; the batch enters the "
        "first one only.",
        "report-not-bytes": "`kept` is a report, and `kept.bytes` is the number in it.",
        "optimizer-counted": "You count state of an optimizer. Plain SGD keeps none: parameters, "
        "gradients, buffers and what is kept for backward are all.",
        "outputs-counted": "You count what a stage returns once more. Where backward needs it, "
        "`kept_for_backward` has counted it.",
        "kept-by-layer": "Two layers of a stage may keep the same tensor, as ReLU its output and the next "
        "layer its input. It is there once: run the whole stage inside one `kept_for_backward`.",
        "evaluation-mode": "You measure, or leave the layers, in evaluation mode. A training step is "
        "meant, in which BatchNorm and dropout keep more: leave the mode as it is.",
        "input-needs-gradient": "What arrives over a cut has to require a gradient. Without, "
        "the first operations of a stage keep nothing, and you count too little.",
        "first-input-leaf": "The batch that enters the first layer needs no gradient: only what comes "
        "over a cut does.",
        "list-of-stages": "Asked is a list with the bytes of each stage.",
        "whole-model": "That is the memory of the whole model: each stage holds its part.",
        "frozen-gradient": "A frozen parameter has no gradient.",
        "buffers-forgotten": "Buffers, such as BatchNorm's running mean, are held too.",
        "four-bytes": "Not every element has four bytes: ask the tensor, `nbytes`.",
        "tied-twice": "A parameter that a stage uses twice is held once. `stage.parameters()` yields "
        "it once, a walk over the layers twice.",
    },
    failures={
        "floating point": "first-input-leaf",
        "mat1 and mat2": "inputs-not-handed-on",
        "'Kept'": "report-not-bytes",
    },
    at_home=True,
)

STRATEGIES = ("equal layers", "equal parameters", "profiled time")


@dataclass
class _Case:
    """One call of compare_cuts: its arguments, and what belongs into the table."""

    layers: nn.Sequential
    inputs: Tensor
    seconds: list[float]
    stages: int

    def cuts(self) -> dict[str, Cuts]:
        numbers = [_numbers(layer) for layer in self.layers]
        return {
            "equal layers": _equal_layers(self.seconds, self.stages),
            "equal parameters": best_cuts(numbers, self.stages),
            "profiled time": best_cuts(self.seconds, self.stages),
        }

    def parts(self, cuts: Cuts) -> list[nn.Sequential]:
        return [self.layers[a:b] for a, b in pairwise([0, *cuts, len(self.layers)])]

    def table(self, answer) -> dict[str, dict]:
        """The answer's table; Wrong where its form is not the one that is asked for, or where a
        strategy's cuts do not come from `cut`."""
        asked: list[list[float]] = []

        def cut(costs: list[float], stages: int) -> Cuts:
            asked.append(list(costs))
            return best_cuts(costs, stages)

        table = answer(self.layers, self.inputs, list(self.seconds), self.stages, cut)
        expect_type(table, dict)
        self._must_have_asked(asked)
        likely = {"rows-missing": True}
        expect(set(table), set(STRATEGIES), what="the rows", likely=likely)
        for name, row in table.items():
            expect_type(row, dict)
            keys = {"cuts", "memory", "slowest", "idle"}
            expect(set(row), keys, what=f"the entries of {name!r}", likely=likely)
        return table

    def _must_have_asked(self, asked: list[list[float]]) -> None:
        numbers, learning, bytes_ = (
            [_numbers(layer, **how) for layer in self.layers]
            for how in ({}, {"trainable": True}, {"unit": "bytes"})
        )
        if numbers not in asked:
            mistakes = {"trainable-only": learning, "bytes-not-numbers": bytes_}
            slugs = [slug for slug, costs in mistakes.items() if costs in asked]
            got = "not among what it was asked"
            slug = slugs[0] if slugs else "not-what-cut-returns"
            raise Wrong(slug, expected=f"cut({show(numbers)}, ...)", got=got)
        if not any(same(costs, list(self.seconds)) for costs in asked):
            expected = "cut(seconds, ...)"
            raise Wrong("not-what-cut-returns", expected=expected, got="not asked")


def _numbers(layer: nn.Module, trainable: bool = False, unit: str = "numel") -> int:
    counted = [p for p in layer.parameters() if p.requires_grad or not trainable]
    return sum(p.numel() if unit == "numel" else p.nbytes for p in counted)


def _kept(parts: list[nn.Sequential], inputs: Tensor, first=False, later=True) -> list[int]:
    """What each stage keeps for backward; `first` and `later`: whether what arrives at the first
    stage and at the later ones requires a gradient."""
    result = []
    for number, part in enumerate(parts):
        learns = later if number else first
        arriving = inputs.detach().requires_grad_(learns and inputs.is_floating_point())
        with kept_for_backward(part) as kept:
            inputs = part(arriving)
        result.append(kept.bytes)
    return result


def _kept_by_layer(parts: list[nn.Sequential], inputs: Tensor) -> list[int]:
    """What each stage keeps if every layer is asked by itself."""
    result = []
    for number, part in enumerate(parts):
        inputs = inputs.detach().requires_grad_(number > 0 and inputs.is_floating_point())
        total = 0
        for layer in part:
            with kept_for_backward(layer) as kept:
                inputs = layer(inputs)
            total += kept.bytes
        result.append(total)
    return result


def _in_mode(case: _Case, training: bool, measure: Callable[[], list[int]]) -> list[int]:
    """What is measured while all layers are in training or in evaluation mode."""
    modes = {module: module.training for module in case.layers.modules()}
    case.layers.train(training)
    try:
        return measure()
    finally:
        for module, mode in modes.items():
            module.training = mode


def _returned(parts: list[nn.Sequential], inputs: Tensor) -> list[int]:
    """The bytes that each stage returns."""
    outputs = list(accumulate(parts, lambda arriving, part: part(arriving), initial=inputs))
    return [tensor.nbytes for tensor in outputs[1:]]


def _held(part: nn.Sequential) -> dict[str, int]:
    """The bytes of a stage's tensors, by kind."""
    return {
        "parameters": _numbers(part, unit="bytes"),
        "gradients": _numbers(part, trainable=True, unit="bytes"),
        "buffers": sum(buffer.nbytes for buffer in part.buffers()),
    }


def _any_of(*values: object) -> Callable[[object], bool]:
    return lambda got: any(same(got, value) for value in values)


def _is_listed(got: object) -> bool:
    return isinstance(got, list | tuple)


def _remainder_left(case: _Case) -> list[Cuts]:
    """Equal layers by those who leave the rest to the last stage, rounding down or up."""
    count, stages = len(case.layers), case.stages
    return [[i * size for i in range(1, stages)] for size in (count // stages, -(-count // stages))]


def _shares_rounded(case: _Case) -> list[Cuts]:
    """Equal layers by those who round i * n / s, to the nearest or down."""
    shares = [i * len(case.layers) / case.stages for i in range(1, case.stages)]
    return [[rounded(share) for share in shares] for rounded in (round, math.floor)]


def _cuts_of_ones(case: _Case) -> Cuts:
    """Equal layers by those who give `cut` the same cost for each."""
    return best_cuts([1] * len(case.layers), case.stages)


def _cuts_by_trainable(case: _Case) -> Cuts:
    return best_cuts([_numbers(layer, trainable=True) for layer in case.layers], case.stages)


def _checked_cuts(answer, case: _Case) -> dict[str, dict]:
    """The answer's table, whose cuts are right: what else stands in a row depends on them."""
    table, expected = case.table(answer), case.cuts()
    likely = {
        "equal layers": {
            "remainder-last": _any_of(*_remainder_left(case)),
            "shares-rounded": _any_of(*_shares_rounded(case)),
            "cut-of-ones": _cuts_of_ones(case),
        },
        "equal parameters": {"trainable-only": _cuts_by_trainable(case)},
        "profiled time": {},
    }
    for name in STRATEGIES:
        others = {
            "same-cuts": _any_of(*expected.values()),
            "ends-included": [0, *expected[name], len(case.layers)],
            "not-equal-layers": name == "equal layers",
            "not-what-cut-returns": True,
        }
        what = f"the cuts of {name!r}"
        expect(table[name]["cuts"], expected[name], what=what, likely={**likely[name], **others})
    return table


def _check_times(answer, case: _Case) -> None:
    table, total = _checked_cuts(answer, case), sum(case.seconds)
    numbers, ones = [_numbers(layer) for layer in case.layers], [1] * len(case.layers)
    slowest_stages = {}
    for name, cuts in case.cuts().items():
        loads = _loads(case.seconds, cuts)
        slowest_stages[name] = loads.index(max(loads))
    by_index = all(table[name]["slowest"] == stage for name, stage in slowest_stages.items())
    for name, cuts in case.cuts().items():
        loads = _loads(case.seconds, cuts)
        slowest = max(loads)
        likely = {
            "one-number": _is_listed,
            "index-not-seconds": by_index,
            "sum-not-slowest": total,
            "mean-not-slowest": total / case.stages,
            "slowest-layer": max(case.seconds),
            "costs-not-seconds": _any_of(max(_loads(numbers, cuts)), max(_loads(ones, cuts))),
            "seconds-otherwise": True,
        }
        expect(table[name]["slowest"], slowest, what=f"slowest of {name!r}", likely=likely)
        busy = total / (case.stages * slowest)
        free = case.stages * slowest - total
        likely = {
            "one-number": _is_listed,
            "idle-one-batch": 1 - 1 / case.stages,
            "busy-not-idle": busy,
            "idle-of-one-stage": 1 - min(loads) / slowest,
            "idle-not-share": _any_of(free, free / case.stages, 100 * (1 - busy)),
            "rounded": _any_of(*(round(1 - busy, digits) for digits in range(1, 5))),
            "idle-otherwise": True,
        }
        expect(table[name]["idle"], 1 - busy, what=f"idle of {name!r}", likely=likely)


def _check_memory(answer, case: _Case) -> None:
    modes = {module: module.training for module in case.layers.modules()}
    table = _checked_cuts(answer, case)
    now = [module.training for module in modes]
    for module, mode in modes.items():
        module.training = mode
    for name, cuts in case.cuts().items():
        parts = case.parts(cuts)
        held, kept = [_held(part) for part in parts], _kept(parts, case.inputs)
        full = [sum(kinds.values()) + keeps for kinds, keeps in zip(held, kept)]
        likely = _memory_mistakes(case, parts, full, kept)
        expect(table[name]["memory"], full, each="stage", what=f"memory of {name!r}", likely=likely)
    before = list(modes.values())
    likely = {"evaluation-mode": sum(now) < sum(before), "training-mode": True}
    expect(now, before, what="training", likely=likely)


def _memory_mistakes(case, parts, full: list[int], kept: list[int]) -> dict[str, object]:
    held = [_held(part) for part in parts]

    def without(kind: str) -> list[int]:
        return [bytes_ - kinds[kind] for bytes_, kinds in zip(full, held)]

    def instead(**feeding: bool) -> list[int]:
        other = _kept(parts, case.inputs, **feeding)
        return [bytes_ - keeps + o for bytes_, keeps, o in zip(full, kept, other)]

    def instead_of_none(copies: int) -> list[int]:
        return [bytes_ + copies * kinds["gradients"] for bytes_, kinds in zip(full, held)]

    one_by_one = [
        sum(sum(_held(layer).values()) for layer in part) + keeps
        for part, keeps in zip(parts, kept)
    ]
    everywhere = [2 * h["parameters"] + h["buffers"] + keeps for h, keeps in zip(held, kept)]
    elements = [
        4
        * (_numbers(part) + _numbers(part, trainable=True) + sum(b.numel() for b in part.buffers()))
        + keeps
        for part, keeps in zip(parts, kept)
    ]
    kept_by_layer = [
        bytes_ - keeps + by_layer
        for bytes_, keeps, by_layer in zip(full, kept, _kept_by_layer(parts, case.inputs))
    ]
    mistakes = {
        "list-of-stages": lambda got: not _is_listed(got),
        "four-bytes": elements,
        "kept-by-layer": kept_by_layer,
        "gradients-forgotten": without("gradients"),
        "activations-forgotten": [bytes_ - keeps for bytes_, keeps in zip(full, kept)],
        "optimizer-counted": _any_of(instead_of_none(1), instead_of_none(2)),
        "outputs-counted": [bytes_ + n for bytes_, n in zip(full, _returned(parts, case.inputs))],
        "input-needs-gradient": instead(later=False),
        "first-input-leaf": instead(first=True),
        "whole-model": lambda got: len(parts) > 1 and len(set(got)) == 1,
        "frozen-gradient": everywhere,
        "buffers-forgotten": without("buffers"),
        "tied-twice": one_by_one,
        "evaluation-mode": _in_mode(case, False, instead),
        "training-mode": _in_mode(case, True, instead),
        "bytes-otherwise": True,
    }
    return {slug: value for slug, value in mistakes.items() if value != full}


def _layer(width_in: int, width_out: int) -> nn.Sequential:
    """A layer whose first operation keeps its input for backward, if that needs a gradient."""
    return nn.Sequential(nn.GELU(), nn.Linear(width_in, width_out))


def _case(draw, count: int, stages: int) -> _Case:
    """Layers for which the three strategies cut at different places."""
    torch.manual_seed(draw.seed())
    while True:
        widths = [draw.integer(3, 24) for _ in range(count + 1)]
        layers = nn.Sequential(*(_layer(a, b) for a, b in pairwise(widths)))
        seconds = [draw.integer(1, 99) / 1000 for _ in range(count)]
        case = _Case(layers, draw.tensor(draw.integer(2, 9), widths[0]), seconds, stages)
        equal, *others = case.cuts().values()
        mistakes = [*_remainder_left(case), *_shares_rounded(case), _cuts_of_ones(case)]
        mistakes = [cuts for cuts in mistakes if cuts != equal]
        if others[0] != others[1] and all(cuts not in others for cuts in [equal, *mistakes]):
            return case


def _even(draw) -> tuple[int, int]:
    """Numbers of layers and of stages that share them out equally."""
    return draw.choice([(6, 2), (8, 2), (6, 3), (9, 3), (12, 4)])


def _uneven(draw) -> tuple[int, int]:
    """Numbers of layers and of stages that do not: with `cut` for equal costs, with the rest in one
    stage and with shares rounded to the nearest, other cuts come out."""
    return draw.choice([(7, 3), (10, 3), (9, 4), (10, 4), (13, 4), (14, 4)])


def _frozen_case(draw) -> _Case:
    """Layers of which some are frozen, and for which that makes a difference."""
    while True:
        case = _case(draw, draw.integer(7, 9), 2)
        for layer in draw.sample(list(case.layers), 3):
            layer.requires_grad_(False)
        if _cuts_by_trainable(case) != case.cuts()["equal parameters"]:
            return case


@comparing.requires("three rows, each with its strategy's cuts")
def _(answer, draw):
    for count, stages in (_even(draw), _even(draw), _uneven(draw), _uneven(draw)):
        _checked_cuts(answer, _case(draw, count, stages))


@comparing.requires("the slowest stage and the idle share")
def _(answer, draw):
    for count, stages in (_even(draw), _uneven(draw)):
        _check_times(answer, _case(draw, count, stages))


@comparing.requires("the memory of every stage, to the byte")
def _(answer, draw):
    for count, stages in (_uneven(draw), _uneven(draw)):
        _check_memory(answer, _case(draw, count, stages))


@comparing.requires("frozen layers, buffers, a tied layer; layers that keep the same tensor")
def _(answer, draw):
    with_frozen, with_buffers, with_tied = (
        _frozen_case(draw),
        *(_case(draw, draw.integer(6, 8), 2) for _ in range(2)),
    )
    _lengthen(with_buffers, lambda width: [nn.BatchNorm1d(width), nn.BatchNorm1d(width).eval()])
    _lengthen(with_tied, lambda width: [_layer(width, width)] * 2)
    with_frozen_prefix, with_relu = _case(draw, draw.integer(6, 8), 2), _relu_case(draw)
    for layer in with_frozen_prefix.layers[: max(c for [c] in with_frozen_prefix.cuts().values())]:
        layer.requires_grad_(False)
    for case in (with_frozen, with_buffers, with_tied, with_frozen_prefix, with_relu):
        _check_memory(answer, case)


def _relu_case(draw) -> _Case:
    """Layers of which every second one keeps its output, which the next one keeps as well."""
    case = _case(draw, 4, 2)
    layers = [part for layer in case.layers for part in (nn.ReLU(), layer[1])]
    return _Case(nn.Sequential(*layers), case.inputs, [0.001 * t for t in range(1, 9)], 2)


def _lengthen(case: _Case, make: Callable[[int], list[nn.Module]]) -> None:
    """Puts layers in front: what `make` returns for the width of the inputs."""
    first = make(case.inputs.shape[1])
    case.layers = nn.Sequential(*first, *case.layers)
    case.seconds = [0.001] * len(first) + case.seconds


@comparing.requires("token numbers as inputs, other dtypes, one stage")
def _(answer, draw):
    torch.manual_seed(draw.seed())
    vocabulary, width, wider = draw.integer(5, 9), draw.integer(3, 8), draw.integer(9, 12)
    tokens = draw.integers(draw.integer(3, 6), 5, low=0, high=vocabulary - 1)
    layers = nn.Sequential(
        nn.Embedding(vocabulary, width),
        _layer(width, wider),
        *(_layer(wider, wider) for _ in range(draw.integer(0, 2))),
        _layer(wider, width),
        _layer(width, 2),
    )
    seconds = [draw.integer(1, 9) / 100 for _ in layers]
    for dtype in (torch.float32, torch.float64):
        for stages in (2, 1):
            case = _Case(layers.to(dtype), tokens, seconds, stages)
            _check_times(answer, case)
            _check_memory(answer, case)
