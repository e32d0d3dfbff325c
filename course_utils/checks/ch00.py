"""The checks of chapter 00: the average of all ranks, the size of a message, passing it on."""

import math
import sys
from dataclasses import dataclass

import torch

from course_utils.checks import Exercise, OwnPart, Wrong, expect, expect_type, run, same
from course_utils.checks.ranks import come_late, following
from course_utils.hardware import device

average = Exercise(
    "0.1",
    "average_over_ranks",
    points=1,
    minutes=3,
    kind="first",
    parameters=("value",),
    hints=[
        "What does `all_reduce` leave in the tensor that you hand in: the sum, or the mean?",
        (
            "`all_reduce` works in place, so hand in a copy. `dist.get_world_size()` tells how many "
            "ranks took part."
        ),
        (
            "Copy the value, let all ranks sum their copies, divide the sum by the number of ranks, "
            "and return it."
        ),
    ],
    misconceptions={
        "sum-not-mean": "You return the sum. `all_reduce` adds; the division is yours.",
        "no-communication": "You divide, but no rank has heard of the others' values yet.",
        "own-value": "You return the rank's own value: nothing was exchanged or averaged.",
        "fixed-number": "You divide by the same number however many ranks there are: ask for the "
        "world size.",
        "divided-by-rank": "You divide by the number that a rank has, and rank 0 has 0. Divide by how "
        "many ranks there are: the world size.",
        "rounded-down": "`//` drops what is behind the point: divide with `/`.",
        "middle-not-mean": "You take the middle: of the sorted values, or between the smallest and the "
        "largest. The mean is the sum over all ranks, divided by their number.",
        "shape-lost": "The values are right and their shape is gone: return a tensor of the shape of "
        "`value`.",
        "another-dtype": "On the way your values have another dtype. The result is float32 as `value` is, "
        "and as exact.",
        "from-before": "The second call returns what the first one had found. Compute anew in every "
        "call: a loop calls with other values each time.",
        "mean-of-values": "You make one number of all values. The mean is over the ranks, for each "
        "place of the tensor by itself, so the shape stays.",
        "number-not-tensor": "Return a tensor of the same shape. `.item()` and `float()` make a plain "
        "number of it.",
        "one-rank-returns": "Some ranks end without a `return`. Every rank has to return the mean.",
        "broadcast": "You hand out rank 0's value, and the others' are lost. A sum needs all of "
        "them: `all_reduce`.",
        "one-buffer": "All gathered values are the last rank's: `[tensor] * n` is n times the same "
        "tensor. Make a new one for each rank.",
        "indexes-ranks": "`value` is this rank's own tensor. What the other ranks hold is not in it: "
        "it has to be sent.",
        "rank-0-only": "Only rank 0 has the mean. `reduce` gives the sum to one rank, `all_reduce` "
        "to all.",
        "input-changed": "The tensor that was handed in has changed: `all_reduce` works in place, "
        "so give it a copy.",
        "not-waited": "You read the result before it has arrived: with `async_op=True` a call comes "
        "back at once. Call `wait()` on what it returns.",
        "uses-none": "`all_reduce` returns nothing: the sum stands in the tensor that you gave it.",
        "only-rank-0-calls": "A collective is a meeting: every rank has to call it, or the ranks "
        "that do wait for ever.",
    },
    failures={
        "timeout": "only-rank-0-calls",
        "'NoneType' and 'int'": "uses-none",
        "IndexError": "indexes-ranks",
    },
)


def _averages(rank, answer, own):
    value = own.to(device())
    untouched = value.clone()
    come_late(rank)
    with following() as sent:
        result = answer(value)
    return result, torch.equal(value, untouched), sent.unwaited


def _check_average(answer, values):
    """Run the answer with one value a rank and compare what every rank got with the mean."""
    ranks = len(values)
    reports = run(_averages, ranks, answer, OwnPart(values))
    results = [result for result, _, _ in reports]
    if any(unwaited for _, _, unwaited in reports):
        raise Wrong("not-waited", expected="a result that has arrived", got="nobody waited for it")
    if any(result is None for result in results) and any(map(torch.is_tensor, results)):
        raise Wrong("one-rank-returns", expected="a tensor from every rank", got="None from some")
    for result in results:
        expect_type(
            result, torch.Tensor, likely="number-not-tensor" if result is not None else None
        )
    total = sum(values)
    mean = total / ranks
    middles = torch.stack(values).quantile(0.5, dim=0), torch.stack(values).median(dim=0).values
    halfway = (torch.stack(values).amax(dim=0) + torch.stack(values).amin(dim=0)) / 2
    one_number = torch.full_like(mean, mean.mean())
    expect(
        results,
        [mean] * ranks,
        each="rank",
        likely={
            "sum-not-mean": [total] * ranks,
            "no-communication": [value / ranks for value in values],
            "own-value": values,
            "fixed-number": lambda got: any(same(got, [total / n] * ranks) for n in (2, 3)),
            "divided-by-rank": [total / rank for rank in range(ranks)],
            "rounded-down": [total // ranks] * ranks,
            "mean-of-values": lambda got: (
                all(result.dim() == 0 for result in got) or same(got, [one_number] * ranks)
            ),
            "shape-lost": lambda got: same([g.flatten() for g in got], [mean.flatten()] * ranks),
            "another-dtype": lambda got: same([g.float() for g in got], [mean] * ranks, 0.01),
            "broadcast": lambda got: any(same(got, [values[0] / n] * ranks) for n in (1, ranks)),
            "one-buffer": [values[-1]] * ranks,
            "rank-0-only": [mean, *results[1:]],
            "middle-not-mean": lambda got: any(
                same(got, [middle] * ranks) for middle in (*middles, halfway)
            ),
        },
    )


@average.requires("three ranks that hold 2, 4 and 9 all get 5")
def _(answer, draw):
    _check_average(answer, [torch.tensor([value]) for value in (2.0, 4.0, 9.0)])


@average.requires("any shape and any number of ranks give the mean", needs_earlier=True)
def _(answer, draw):
    shape = draw.integer(2, 5), draw.integer(2, 5)
    for ranks in (draw.integer(4, 6), 2, 1):
        _check_average(answer, [draw.tensor(*shape) for _ in range(ranks)])


@average.requires("the tensor that was handed in is unchanged", needs_earlier=True)
def _(answer, draw):
    length = draw.integer(3, 9)
    values = [draw.tensor(length) for _ in range(2)]
    if not all(untouched for _, untouched, _ in run(_averages, 2, answer, OwnPart(values))):
        raise Wrong("input-changed", expected="the same values as before", got="other values")
    steps = [[draw.tensor(length) for _ in range(2)] for _ in range(2)]  # the values of both ranks
    again = run(_averages_twice, 2, answer, OwnPart([*zip(*steps)]))
    means = [sum(values) / 2 for values in steps]
    likely = {"from-before": [means[0]] * 2}
    expect(again, [means[1]] * 2, each="rank", what="the second call", likely=likely)


def _averages_twice(rank, answer, own):
    """What the second of two calls gives, with another value each."""
    return [answer(value.to(device())) for value in own][-1]


size = Exercise(
    "0.2",
    "message_bytes",
    points=1,
    minutes=2,
    kind="first",
    parameters=("tensor",),
    hints=[
        "Two things decide: how many values there are, and how much one value takes.",
        "A tensor knows both: look for `numel` and `element_size` in its documentation.",
        "Multiply the number of values by the bytes that one value of this dtype takes.",
    ],
    misconceptions={
        "values-not-bytes": "You count the values. A value takes more than one byte: ask the "
        "tensor how many.",
        "four-bytes": "You take 4 bytes a value. That is float32; other dtypes take 1, 2 or 8.",
        "python-object": "`sys.getsizeof` measures the Python object, not the values of the tensor.",
        "one-value": "You return the bytes of one value: count the values too.",
        "dimensions-added": "You add the sizes of the dimensions. Multiplied they give the number "
        "of values.",
        "first-dimension": "You count the rows only: `len` and `shape[0]` leave out the other "
        "dimensions.",
        "two-dimensions": "You count two dimensions. A tensor may have any number of them.",
        "dimensions-counted": "You count the dimensions. `tensor.dim()` is their number, and each "
        "has its size.",
        "bits-not-bytes": "You count bits: 8 of them are one byte.",
        "divided-by-eight": "You divide by 8. `element_size` and `nbytes` are in bytes already, and so is "
        "the result.",
        "not-in-bytes": "That is the size in KB or MB. Asked are bytes.",
        "not-a-whole-number": "Return a whole number of Python's, an `int`: `/` makes a float, `//` "
        "does not, and `.item()` takes a number out of a tensor.",
        "shape-not-number": "`tensor.size()` and `tensor.shape` are the sizes of the dimensions, not "
        "the number of values. Look for `numel`.",
        "not-called": "Without brackets, `tensor.numel` is the method itself. `tensor.numel()` calls "
        "it.",
        "dtype-no-number": "A dtype is no number. Ask the tensor how many bytes a value takes: "
        "`element_size`.",
        "floats-only": "`torch.finfo` knows floating point dtypes only. The tensor knows what a value "
        "takes, whatever the dtype: `element_size`.",
        "dtype-table": "Your rule does not fit every dtype. The tensor knows what a value takes: "
        "`element_size`.",
        "numpy-lacks-dtypes": "numpy does not have all of PyTorch's dtypes, bfloat16 for one. Ask the "
        "tensor itself.",
        "whole-storage": "You count the memory behind the tensor. A view sends only its own "
        "values, not those of the tensor that it looks into.",
        "half-a-complex": "A complex number is two real ones, and `torch.finfo` tells about one of "
        "them. The tensor knows what a value takes: `element_size`.",
        "bool-as-a-bit": "A bool takes a whole byte in memory, not a bit of one.",
        "no-dimensions-no-value": "A tensor without dimensions holds one value: the product of no "
        "sizes is 1, not 0.",
        "memory-not-values": "You count the places in memory. Expanded, a tensor shows one place "
        "as several values, and what is sent is every value.",
        "zeros-count": "You count the values that are not zero: a zero is sent as well.",
        "other-than-values": "You measure a file or an object made of the tensor: what stands "
        "around the values counts too.",
        "rows-by-stride": "`stride` tells how far apart two rows lie in memory. Between the rows "
        "of a view lies what does not belong to it.",
        "empty-holds-none": "A tensor with a size of 0 holds no values, so it takes 0 bytes.",
    },
    failures={
        "'builtin_function_or_method'": "not-called",
        "len() of a 0-d tensor": "first-dimension",
        "'torch.dtype'": "dtype-no-number",
        "torch.finfo() requires": "floats-only",
        "KeyError": "dtype-table",
        "unsupported ScalarType": "numpy-lacks-dtypes",
        "not supported by torch.iinfo": "dtype-table",
    },
)


@size.requires("a float32 tensor of any shape")
def _(answer, draw):
    tensor = draw.tensor(draw.integer(5, 8), draw.integer(5, 8), 3)
    _check_size(answer, tensor)


@size.requires("dtypes of 1, 2 and 8 bytes")
def _(answer, draw):
    ordinary = torch.bfloat16, torch.uint8, torch.float64
    for dtype in (*ordinary, torch.bool, torch.complex64):
        otherwise = None if dtype in ordinary else "dtype-table"
        _check_size(answer, torch.zeros(draw.integer(2, 6), 5, dtype=dtype), otherwise)


@size.requires("a view of a larger tensor")
def _(answer, draw):
    _check_size(answer, draw.tensor(8, 10)[2:5, : draw.integer(3, 7)])


@size.requires("an expanded tensor")
def _(answer, draw):
    _check_size(answer, draw.tensor(draw.integer(2, 6), 1).expand(-1, draw.integer(3, 7)))


@size.requires("a single number and an empty tensor")
def _(answer, draw):
    _check_size(answer, torch.tensor(1.0))
    _check_size(answer, torch.zeros(0, 4))


def _check_size(answer, tensor, otherwise=None):
    """Compares the answer with the bytes of the tensor; `otherwise` is the mistake to name where
    none fits."""
    values, each = tensor.numel(), tensor.element_size()
    rows, added = len(tensor) if tensor.dim() else 1, sum(tensor.shape)
    # from the first value to the last one, what lies between them counted as well
    span = 1 + sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape))
    memory = tensor.untyped_storage().nbytes(), span * each
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    places = math.prod(size for size, step in sizes if step) if 0 in tensor.stride() else None
    got = answer(tensor)
    if isinstance(got, tuple):
        raise Wrong("shape-not-number", expected="a whole number", got=got)
    expect(
        got,
        values * each,
        what=f"the size of {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}",
        likely={
            "no-dimensions-no-value": 0 if tensor.dim() == 0 else False,
            "empty-holds-none": lambda got: values == 0 and got > 0,
            "zeros-count": lambda got: got == 0 < values and not tensor.any(),
            "memory-not-values": lambda got: places is not None and got == places * each,
            "rows-by-stride": lambda got: (
                not tensor.is_contiguous() and got == rows * tensor.stride(0) * each
            ),
            "half-a-complex": values * each // 2 if tensor.is_complex() else False,
            "bool-as-a-bit": lambda got: (
                tensor.dtype == torch.bool
                and got in (values // 8, math.ceil(values / 8), values / 8)
            ),
            "divided-by-eight": values > 8
            and (lambda got: got in (values * each // 8, values // 8, values * (each // 8))),
            "values-not-bytes": values,
            "one-value": each,
            "two-dimensions": math.prod(tensor.shape[:2]) * each if tensor.dim() > 2 else False,
            "dimensions-counted": lambda got: got in (tensor.dim(), tensor.dim() * each),
            "first-dimension": lambda got: got in (rows, rows * each),
            "dimensions-added": lambda got: got in (added, added * each),
            "bits-not-bytes": 8 * values * each,
            "four-bytes": 4 * values,
            "whole-storage": lambda got: got in memory,
            "not-in-bytes": lambda got: any(
                same(got, values * each / unit) for unit in (1000, 1024, 10**6, 2**20)
            ),
            "python-object": sys.getsizeof(tensor),
            "other-than-values": lambda got: got > values * each + 200,
            **({otherwise: True} if otherwise else {}),
        },
    )
    if not isinstance(got, int):
        raise Wrong("not-a-whole-number", expected="an int", got=type(got).__name__)


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
        "all-begin-alike": "Somebody waits in a send or a receive that nobody answers. If all ranks "
        "begin with `send`, nobody receives, and the other way round: let one rank begin otherwise.",
        "no-such-rank": "There is no such rank. The numbers go round: after the last rank comes rank "
        "0, however many there are.",
        "wrong-direction": "The values travel the wrong way round: rank 0 sends to rank 1, and "
        "receives from the last.",
        "own-value": "You return the value that the rank already had: return what was received.",
        "sends-to-itself": "With one rank there is nobody to send to. Return a copy of the value.",
        "no-wrap": "Rank 0 still has its own value: after the last rank comes rank 0.",
        "broadcast": "Every rank has rank 0's value. Each sends on its own, not what came in.",
        "recv-returns-a-rank": "`recv` returns the number of the sender. What was sent stands in the "
        "tensor that you gave it.",
        "pairs-only": "You exchange tensors within pairs of ranks. On the ring each rank sends to the next "
        "one, and receives from the one before it.",
        "not-as-it-is": "What travels is not the tensor as it is: another dtype loses digits, and a "
        "pickled object is a copy more on both sides. Send the tensor, and receive into one of its "
        "shape and dtype.",
        "another-shape": "What arrives needs a tensor of the shape and dtype of what is sent: "
        "`torch.empty_like(value)`.",
        "not-waited": "`isend` and `irecv` come back at once. Call `wait()` on what they return, or "
        "the message may not have arrived.",
        "collective": "You called a collective, in which every rank takes part. One message to the next "
        "rank is enough: `send` and `recv`.",
        "input-changed": "The tensor that was handed in has changed: receive into a tensor of "
        "your own.",
        "not-a-copy": "With one rank you return the tensor that was handed in, not a copy of it.",
    },
    failures={
        "timeout": "all-begin-alike",
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
    unwaited: list[str]
    collectives: list[str]
    dtypes: set[torch.dtype]  # of what was sent


def _passed(rank, answer, own):
    value = own.to(device())
    untouched = value.clone()
    come_late(rank)
    with following() as sent:
        result = answer(value)
    collectives = {kind for kind, _ in sent.dtypes} - {"send", "recv"}
    dtypes = {dtype for kind, dtype in sent.dtypes if kind == "send"}
    memory = result.untyped_storage().data_ptr() if torch.is_tensor(result) else None
    unchanged, copied = torch.equal(value, untouched), memory != value.untyped_storage().data_ptr()
    return _Passed(result, unchanged, copied, sent.unwaited, sorted(collectives), dtypes)


def _check_pass(answer, values):
    ranks = len(values)
    reports = run(_passed, ranks, answer, OwnPart(values))
    for report in reports:
        if report.unwaited:
            got = f"nobody waited for a {report.unwaited[0]}"
            raise Wrong("not-waited", expected="a wait() for every message", got=got)
    results = [report.result for report in reports]
    for result in results:
        number = isinstance(result, int)
        expect_type(result, torch.Tensor, likely="recv-returns-a-rank" if number else None)
    expect(
        results,
        [values[rank - 1] for rank in range(ranks)],
        each="rank",
        likely={
            "own-value": values,
            "broadcast": [values[0]] * ranks,
            "no-wrap": [values[0], *values[:-1]],
            "wrong-direction": [values[(rank + 1) % ranks] for rank in range(ranks)],
            "pairs-only": [values[rank ^ 1 if rank ^ 1 < ranks else rank] for rank in range(ranks)],
            "another-shape": lambda got: [g.shape for g in got] != [v.shape for v in values],
        },
    )
    for report in reports:
        if report.collectives:
            got = f"a call that is a collective: {report.collectives[0]}"
            raise Wrong("collective", expected="messages from rank to rank", got=got)
        if report.dtypes - {values[0].dtype}:
            got = ", ".join(map(str, report.dtypes))
            raise Wrong("not-as-it-is", expected=f"messages of {values[0].dtype}", got=got)


@pass_on.requires("three ranks: each gets its predecessor's tensor")
def _(answer, draw):
    length = draw.integer(2, 8)
    _check_pass(answer, [draw.tensor(length) for _ in range(3)])


@pass_on.requires(
    "two ranks, and more than three, with tensors of two dimensions and other dtypes",
    needs_earlier=True,
)
def _(answer, draw):
    shape = draw.integer(2, 5), draw.integer(2, 5)
    for ranks in (draw.integer(4, 6), 2):
        _check_pass(answer, [draw.tensor(*shape) for _ in range(ranks)])
    for values in (
        [draw.integers(*shape) for _ in range(2)],
        [draw.tensor(*shape, dtype=torch.float64) for _ in range(2)],
    ):
        _check_pass(answer, values)


@pass_on.requires("the tensor that was handed in is unchanged", needs_earlier=True)
def _(answer, draw):
    values = [draw.tensor(4) for _ in range(2)]
    if not all(report.unchanged for report in run(_passed, 2, answer, OwnPart(values))):
        raise Wrong("input-changed", expected="the same values as before", got="other values")


@pass_on.requires(
    "one rank gets a copy of its own tensor",
    failures=dict.fromkeys(
        ("RuntimeError", "ValueError", "there is no rank", "timeout"), "sends-to-itself"
    ),
)
def _(answer, draw):
    value = draw.tensor(4)
    [report] = run(_passed, 1, answer, OwnPart([value]))
    expect_type(report.result, torch.Tensor)
    expect(report.result, value)
    if not report.copied:
        raise Wrong("not-a-copy", expected="a tensor of its own", got="the tensor handed in")
