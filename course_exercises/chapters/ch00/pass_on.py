"""Exercise 0.3, `pass_on`: what it asks for, and how it is checked."""

from dataclasses import dataclass

import torch

from course_exercises.authoring import (
    Exercise,
    OwnPart,
    Wrong,
    expect,
    expect_from_each,
    expect_type,
    run,
    signs,
)
from course_exercises.authoring.ranks import (
    Sent,
    come_late,
    following,
    must_have_sent,
    must_have_waited,
)
from course_utils.hardware import device

pass_on = Exercise(
    "0.3",
    "pass_on",
    points=2,
    minutes=5,
    kind="core",
    parameters=("value",),
    hints=[
        "`send` waits until the other side takes the bytes. What if every rank begins with it?",
        (
            "One rank has to receive first. The neighbours' numbers go round: after the last rank "
            "comes rank 0, and the remainder operator `%` does that."
        ),
        (
            "Let rank 0 receive before it sends, and all others send before they receive. With one "
            "rank there is nobody to send to: return a copy."
        ),
    ],
    misconceptions={
        "all-begin-alike": "All ranks begin with `send`, and so nobody receives: let one rank receive first.",
        "nobody-answers": "A rank waits in a send or a receive that no other rank answers. Is a rank's number fixed, "
        "as in `dst=1`? Or do all ranks begin with `recv`?",
        "no-wrap": "Rank 0 still has its own value, since nobody sends to it. After the last rank comes rank 0: send "
        "to (rank + 1) % n.",
        "wrong-direction": "Your values travel the wrong way round: each rank has its successor's. Send to "
        "(rank + 1) % n, and receive from (rank - 1) % n.",
        "sends-to-itself": "With one rank there is nobody to send to. Return a copy of the value.",
        "recv-returns-a-rank": "`recv` returns the number of the sender. What was sent stands in the "
        "tensor that you gave it.",
        "not-as-it-is": "What travels is not the tensor as it is: another dtype loses digits, and a "
        "pickled object is a copy more on both sides. Send the tensor, and receive into one of its "
        "shape and dtype.",
        "another-shape": "What arrives needs a tensor of the shape and dtype of what is sent: "
        "`torch.empty_like(value)`.",
        "collective": "You called a collective, in which every rank takes part. One message to the next "
        "rank is enough: `send` and `recv`.",
        "not-a-copy": "With one rank you return the tensor that was handed in, not a copy of it.",
    },
    failures={
        "timeout": "nobody-answers",
        "there is no rank": "no-such-rank",
        "mismatch": "another-shape",
    },
)


@dataclass(frozen=True)
class _Passed:
    """What came of a call of the answer on one rank."""

    result: object
    unchanged: bool
    copied: bool
    sent: Sent
    collectives: list[str]
    dtypes: set[torch.dtype]  # of what was sent


def _passed(rank, answer, own):
    value = own.to(device())
    untouched = value.clone()
    come_late(rank)
    with following(2 * value.numel()) as sent:
        result = answer(value)
    collectives = {kind for kind, _ in sent.dtypes} - {"send", "recv"}
    dtypes = {dtype for kind, dtype in sent.dtypes if kind == "send"}
    memory = result.untyped_storage().data_ptr() if torch.is_tensor(result) else None
    unchanged, copied = torch.equal(value, untouched), memory != value.untyped_storage().data_ptr()
    return _Passed(result, unchanged, copied, sent, sorted(collectives), dtypes)


def _check_pass(answer, values):
    ranks = len(values)
    reports = run(_passed, ranks, answer, OwnPart(values))
    must_have_waited([report.sent.unwaited for report in reports])
    results = [report.result for report in reports]
    expect_from_each(results, likely="recv-returns-a-rank" if int in map(type, results) else None)
    expected = [values[rank - 1] for rank in range(ranks)]
    likely = {
        "wrong-direction": ranks > 2 and [values[(rank + 1) % ranks] for rank in range(ranks)],
        "no-wrap": [values[0], *expected[1:]],
        **signs(values, expected),
        "another-shape": lambda got: [g.shape for g in got] != [v.shape for v in values],
    }
    expect(results, expected, each="rank", likely=likely)
    for report in reports:
        if report.collectives:
            got = f"a call that is a collective: {report.collectives[0]}"
            raise Wrong("collective", expected="messages from rank to rank", got=got)
        if report.dtypes - {values[0].dtype}:
            got = ", ".join(map(str, report.dtypes))
            raise Wrong("not-as-it-is", expected=f"messages of {values[0].dtype}", got=got)
    must_have_sent([report.sent for report in reports])


@pass_on.requires(
    "three ranks: each gets its predecessor's tensor",
    failures={
        **dict.fromkeys(("waits in recv", "wait in recv", "finished without"), "nobody-answers"),
        "waits in send": "all-begin-alike",
    },
)
def three_ranks_each_gets_its_predecessor_tensor(answer, draw):
    length = draw.integer(2, 8)
    _check_pass(answer, [draw.tensor(length) for _ in range(3)])


@pass_on.requires(
    "two ranks, and more than three, with tensors of two dimensions and other dtypes",
    needs_earlier=True,
)
def two_ranks_and_more_than_three_with_tensors(answer, draw):
    shape = draw.integer(2, 5), draw.integer(2, 5)
    for ranks in (draw.integer(4, 6), 2):
        _check_pass(answer, [draw.tensor(*shape) for _ in range(ranks)])
    for values in (
        [draw.integers(*shape) for _ in range(2)],
        [draw.tensor(*shape, dtype=torch.float64) for _ in range(2)],
    ):
        _check_pass(answer, values)


@pass_on.requires("the tensor that was handed in is unchanged", needs_earlier=True)
def the_tensor_that_was_handed_in_is_unchanged(answer, draw):
    values = [draw.tensor(4) for _ in range(2)]
    if not all(report.unchanged for report in run(_passed, 2, answer, OwnPart(values))):
        raise Wrong("input-changed", expected="the same values as before", got="other values")


@pass_on.requires(
    "one rank gets a copy of its own tensor",
    failures=dict.fromkeys(
        ("RuntimeError", "ValueError", "there is no rank", "timeout"), "sends-to-itself"
    ),
)
def one_rank_gets_a_copy_of_its_own(answer, draw):
    value = draw.tensor(4)
    [report] = run(_passed, 1, answer, OwnPart([value]))
    expect_type(report.result, torch.Tensor)
    expect(report.result, value)
    if not report.copied:
        raise Wrong("not-a-copy", expected="a tensor of its own", got="the tensor handed in")
