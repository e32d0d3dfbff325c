"""Exercise 0.2, `message_bytes`: what it asks for, and how it is checked."""

import math
import sys

import torch

from course_exercises.authoring import Exercise, Wrong, expect, same

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
        "one-value": "You return the bytes of one value: count the values too.",
        "bytes-of-a-value": "That is another number of bytes for each value than this dtype takes. They depend on "
        "the dtype: 4 for float32, 2 for bfloat16, 8 for float64 and complex64, 1 for a bool. No table and no "
        "rule knows all of them; the tensor does: `element_size()`.",
        "number-of-values": "You count something else than the values. Their number is the product of all sizes in "
        "`tensor.shape`, zeros and repeated places in memory included: look for `numel`.",
        "other-unit": "That is the size in bits, in KB or in MB, or an eighth of it. `element_size` and `nbytes` "
        "are in bytes, and so is the result.",
        "memory-not-values": "You measure memory, a file or an object of Python's. That also counts Python's own overhead, or "
        "memory that a view skips; only the values are sent.",
        "not-a-whole-number": "Return a whole number of Python's, an `int`. `/` makes a float, and `//` does not; "
        "`.item()` takes a number out of a tensor; `tensor.size()` and `tensor.shape` are tuples.",
        "not-called": "Without brackets, `tensor.numel` is the method itself. `tensor.numel()` calls it.",
    },
    failures={
        "'builtin_function_or_method'": "not-called",
        "len() of a 0-d tensor": "number-of-values",
        "IndexError": "number-of-values",
        "'torch.dtype'": "bytes-of-a-value",
        "torch.finfo() requires": "bytes-of-a-value",
        "not supported by torch.iinfo": "bytes-of-a-value",
        "KeyError": "bytes-of-a-value",
        "unsupported ScalarType": "bytes-of-a-value",
    },
)


@size.requires("a float32 tensor of any shape")
def a_float32_tensor_of_any_shape(answer, draw):
    tensor = draw.tensor(draw.integer(5, 8), draw.integer(5, 8), 3)
    _check_size(answer, tensor)


@size.requires("dtypes of 1, 2 and 8 bytes")
def dtypes_of_1(answer, draw):
    for dtype in (torch.bfloat16, torch.uint8, torch.float64, torch.bool, torch.complex64):
        _check_size(answer, torch.zeros(draw.integer(2, 6), 5, dtype=dtype))


@size.requires("a view of a larger tensor")
def a_view_of_a_larger_tensor(answer, draw):
    _check_size(answer, draw.tensor(8, 10)[2:5, : draw.integer(3, 7)])


@size.requires("an expanded tensor")
def an_expanded_tensor(answer, draw):
    # 4 times as many values would be those of another dtype
    _check_size(answer, draw.tensor(draw.integer(2, 6), 1).expand(-1, draw.choice([3, 5, 6, 7])))


@size.requires("a single number and an empty tensor")
def a_single_number_and_an_empty_tensor(answer, draw):
    _check_size(answer, torch.tensor(1.0))
    _check_size(answer, torch.zeros(0, 4))


def _check_size(answer, tensor):
    """Compares the answer with the bytes of the tensor."""
    values, each = tensor.numel(), tensor.element_size()
    got = answer(tensor)
    if isinstance(got, tuple):
        raise Wrong("not-a-whole-number", expected="a whole number", got=got)
    counts = _other_counts(tensor)
    likely = {
        "bytes-of-a-value": lambda got: got in _with_another_size(values, each, tensor.dtype),
        "number-of-values": lambda got: got in counts or got in [count * each for count in counts],
        "one-value": each,
        "other-unit": lambda got: (
            got == values // 8 or any(same(got, values * each * unit) for unit in UNITS)
        ),
        "memory-not-values": lambda got: got in _memories(tensor) or got > values * each + 200,
    }
    kind = str(tensor.dtype).removeprefix("torch.")
    what = f"the size of {tuple(tensor.shape)} {kind}"
    # a multiple of the size is no measure of memory
    if isinstance(got, int) and values and got % (values * each) == 0:
        del likely["memory-not-values"]
    expect(got, values * each, what=what, likely=likely)
    if not isinstance(got, int):
        raise Wrong("not-a-whole-number", expected="an int", got=type(got).__name__)


UNITS = 8, 1 / 8, 1e-3, 2**-10, 1e-6, 2**-20  # bits, eighths, KB and MB


def _other_counts(tensor) -> set[int]:
    """What one may take for the number of values, and is not."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    counts = {
        len(tensor) if tensor.dim() else 0,
        sum(tensor.shape),
        math.prod(tensor.shape[:2]),
        tensor.dim(),
        math.prod(size for size, step in sizes if step),  # of an expanded tensor, its places
        int(tensor.count_nonzero()),
        max(tensor.numel(), 1),
    }
    return counts - {tensor.numel()}


def _with_another_size(values: int, each: int, dtype: torch.dtype) -> set[int]:
    """The bytes of this many values of another dtype."""
    bits = {values // 8, math.ceil(values / 8)} if dtype == torch.bool else set()
    return bits | {values * size for size in (1, 2, 4, 8, 16) if size != each}


def _memories(tensor) -> set[int]:
    """The bytes of the tensor behind a view, from its first value to its last, of its rows at the distance
    that they have there, and of Python's object."""
    span = 1 + sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape))
    rows = tensor.shape[0] * tensor.stride(0) if tensor.dim() else 1
    sizes = {span * tensor.element_size(), rows * tensor.element_size()}
    return sizes | {tensor.untyped_storage().nbytes(), sys.getsizeof(tensor)}
