"""Exercise 4.2, `hand_over`: what it asks for, and how it is checked."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from course_exercises.authoring import Exercise, expect, expect_type, run, same
from course_exercises.authoring.compare import TOLERANCE
from course_exercises.authoring.ranks import following, must_have_waited
from course_exercises.authoring.vocabulary import times
from course_utils.hardware import device

crossing = Exercise(
    "4.2",
    "hand_over",
    points=3,
    minutes=60,
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
        "wrong-peer": "A rank plays the other's half, or talks to the wrong one. Rank 0 calls "
        "`stage(data)` and sends to rank 1; rank 1 receives from rank 0: `dst` and `src` are always "
        "the other's number.",
        "unanswered": "A rank waits for a message that the other has not sent. Every send needs a recv on the other "
        "rank, in the same order: first all tensors go forward, then a gradient comes back for each floating-point "
        "one, whether the loss uses it or not.",
        "not-as-asked": "What is sent is not what the rules say, or not in their order: each tensor of the list, from the first to the "
        "last, and then, in the same order, the gradient of each floating-point one. Each has the shape and the dtype that `room` shows.",
        "tuple-not-tensor": "The tensors cross one by one. `stage(data)` returns a tuple, also of a single tensor: go "
        "through it. On rank 1 the stage takes them one by one again, and the targets behind them: "
        "`stage(*tensors, data)`, with the star.",
        "no-leaf": "Rank 1 has no gradients to send. What arrives has to require one before "
        "the stage runs, `requires_grad_()`; then `loss.backward()` fills the `.grad` of all of them.",
        "room-is-leaf": "Your leaf is the tensor of `room` itself. In the next step it comes again, with "
        "the `.grad` of this one in it, and you hand back the sum of both. Make the leaf with "
        "`tensor.detach().requires_grad_()`.",
        "without-gradient": "Not every tensor that crosses has a gradient. For an integer one nothing comes back. Of one "
        "that the loss does not use, `.grad` is None, and zeros go back. One without a graph on rank 0 is left out of "
        "backward once its gradient has come.",
        "rank-0-backward": "Rank 0's backward is missing, or begins with something else than the gradients that "
        "rank 1 sends, each for its own tensor. Run it once for all tensors, since they may share a part of the graph: "
        "`torch.autograd.backward(tensors, gradients)`.",
        "backward-each": "You run backward once for each tensor. They share a part of the graph, which the first pass "
        "frees. Call `torch.autograd.backward(tensors, gradients)` once for all of them, without `retain_graph`.",
        "gradients-replaced": "A second step has replaced the gradients. Backward adds to `.grad`; "
        "clearing it is the caller's job.",
        "loss": "Rank 1 returns the loss as a number of Python's, `loss.item()`. Rank 0 has none and returns None.",
    },
    things="gradients",
    failures={
        "timeout": "unanswered",
        "mismatch": "not-as-asked",
        "a second time": "backward-each",
        "only for scalar outputs": "rank-0-backward",
        "be contiguous": "needs-contiguous",
        "'tuple'": "tuple-not-tensor",
        "then the targets": "tuple-not-tensor",
        "same as the rank of the current process": "wrong-peer",
        "names itself": "wrong-peer",
        "there is no rank": "wrong-peer",
        "the targets alone": "wrong-peer",
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


@dataclass(frozen=True)
class _Whole:
    """What the model gives that is not cut: its loss, the gradients of both stages, and, by rank, what
    crosses and what comes back."""

    loss: float
    gradients: tuple[dict, dict]
    messages: tuple[list[Tensor], list[Tensor]]


def _whole(cut: _Cut) -> _Whole:
    first, last, inputs, targets = cut.make()
    tensors = first(inputs)
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    loss = last(*leaves, targets)
    loss.backward()
    pairs = [(t, leaf.grad) for t, leaf in zip(tensors, leaves) if t.requires_grad]
    torch.autograd.backward(*zip(*(pair for pair in pairs if pair[1] is not None)))
    floating = [leaf for leaf in leaves if leaf.is_floating_point()]
    back = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in floating]
    messages = [leaf.detach().cpu() for leaf in leaves], [gradient.cpu() for gradient in back]
    return _Whole(loss.item(), (_gradients(first), _gradients(last)), messages)


def _zeros_for_none(got: dict, expected: dict) -> bool:
    return any(got[name] is not None and g is None for name, g in expected.items())


def _check_crossing(answer, draw, kind, dtype=torch.float32, steps=1) -> None:
    cut = _Cut(kind, draw.seed(), *draw.sample(range(2, 8), 3), dtype)
    reports, whole = run(_crossed, 2, answer, cut, steps), _whole(cut)
    must_have_waited([report.unwaited for report in reports])
    double = dtype == torch.float64  # where a detour through float32 would be seen
    tolerance = 1e-10 if double else TOLERANCE
    zero, one = reports
    other = [not same(r.sent, m, tolerance) for r, m in zip(reports, whole.messages)]
    for rank in (1, 0):  # rank 0 begins with what rank 1 sends
        once, got = whole.gradients[rank], reports[rank].gradients
        expected = times(once, steps)
        nothing = all(g is None or not g.any() for g in got.values())
        likely = {
            "zeros-for-none": _zeros_for_none(got, once),
            # in the second step twice the gradient: 3 where 2 are right
            "room-is-leaf": rank == 0 and steps == 2 and times(once, 3),
            "gradients-replaced": steps > 1 and once,
            "no-leaf": nothing and (rank == 1 or not any(sent.any() for sent in one.sent)),
            "not-as-asked": other[1] if rank == 0 else other[0],
            "rank-0-backward": rank == 0,
        }
        expect(got, expected, what=f"gradients on rank {rank}", likely=likely, tolerance=tolerance)
    expect(one.returned, whole.loss, what="rank 1's loss", likely={"loss": True})
    expect_type(one.returned, float, likely="loss")
    expect(zero.returned, None, what="what rank 0 returns", likely={"loss": True})
    for rank, report in enumerate(reports):
        expect(report.calls, steps, what=f"forward passes of rank {rank}'s stage")
        modes, likely = [False] + [True] * (len(report.modes) - 1), {"mode-changed": True}
        expect(report.modes, modes, what=f"training, on rank {rank}", likely=likely)
        what, likely = f"what rank {rank} sends", {"not-as-asked": True}
        sent = whole.messages[rank]
        expect(report.sent, sent, each="message", what=what, likely=likely, tolerance=tolerance)


@crossing.requires(
    "one tensor crosses: both stages get the whole model's gradients",
    failures={"'NoneType'": "no-leaf", "does not require grad": "no-leaf"},
)
def one_tensor_crosses(answer, draw):
    _check_crossing(answer, draw, "one")


@crossing.requires("two tensors cross that share a part of the graph", needs_earlier=True)
def two_tensors_cross_that_share_a_part(answer, draw):
    _check_crossing(answer, draw, "two")


@crossing.requires("gradients add up over two steps, in float64", needs_earlier=True)
def gradients_add_up_over_two_steps(answer, draw):
    _check_crossing(answer, draw, "two", torch.float64, steps=2)


@crossing.requires("a tensor that is not contiguous", needs_earlier=True)
def a_tensor_that_is_not_contiguous(answer, draw):
    _check_crossing(answer, draw, "turned")


@crossing.requires(
    "an integer tensor between two others",
    failures=dict.fromkeys(
        ("floating point", "'NoneType'", "does not require grad"), "without-gradient"
    ),
    needs_earlier=True,
)
def an_integer_tensor_between_two_others(answer, draw):
    _check_crossing(answer, draw, "numbers")


@crossing.requires(
    "a tensor that the loss does not use",
    failures={"'NoneType'": "without-gradient", "timeout": "without-gradient"},
    needs_earlier=True,
)
def a_tensor_that_the_loss_does_not_use(answer, draw):
    _check_crossing(answer, draw, "unused")


@crossing.requires(
    "a floating-point tensor without a graph behind it",
    failures={
        "does not require grad": "without-gradient",
        "timeout": "without-gradient",
        "mismatch": "without-gradient",
    },
    needs_earlier=True,
)
def a_floating_point_tensor_without_a_graph_behind(answer, draw):
    _check_crossing(answer, draw, "constant")
