"""Exercise 4.2, `hand_over`: what it asks for, and how it is checked."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, run, same
from course_exercises.authoring.compare import TOLERANCE
from course_exercises.authoring.ranks import following
from course_utils.hardware import device

crossing = Exercise(
    "4.2",
    "hand_over",
    points=3,
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
def one_tensor_crosses(answer, draw):
    _check_crossing(answer, draw, "one")


@crossing.requires(
    "two tensors cross that share a part of the graph",
    failures={"finished without": "unanswered", "timeout": "waits-too-early"},
    needs_earlier=True,
)
def two_tensors_cross_that_share_a_part(answer, draw):
    _check_crossing(answer, draw, "two")


@crossing.requires(
    "gradients add up over two steps, in float64",
    failures={"mismatch": "float32-only"},
    needs_earlier=True,
)
def gradients_add_up_over_two_steps(answer, draw):
    _check_crossing(answer, draw, "two", torch.float64, steps=2)


@crossing.requires("a tensor that is not contiguous", needs_earlier=True)
def a_tensor_that_is_not_contiguous(answer, draw):
    _check_crossing(answer, draw, "turned")


@crossing.requires(
    "an integer tensor between two others",
    failures=dict.fromkeys(
        ("floating point", "'NoneType'", "does not require grad"), "integer-leaf"
    ),
    needs_earlier=True,
)
def an_integer_tensor_between_two_others(answer, draw):
    _check_crossing(answer, draw, "numbers")


@crossing.requires(
    "a tensor that the loss does not use",
    failures={"'NoneType'": "unused-tensor", "timeout": "unused-tensor"},
    needs_earlier=True,
)
def a_tensor_that_the_loss_does_not_use(answer, draw):
    _check_crossing(answer, draw, "unused")


@crossing.requires(
    "a floating-point tensor without a graph behind it",
    failures={
        "does not require grad": "constant-tensor",
        "timeout": "constant-tensor",
        "mismatch": "constant-tensor",
    },
    needs_earlier=True,
)
def a_floating_point_tensor_without_a_graph_behind(answer, draw):
    _check_crossing(answer, draw, "constant")
