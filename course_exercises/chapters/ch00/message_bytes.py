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
def a_float32_tensor_of_any_shape(answer, draw):
    tensor = draw.tensor(draw.integer(5, 8), draw.integer(5, 8), 3)
    _check_size(answer, tensor)


@size.requires("dtypes of 1, 2 and 8 bytes")
def dtypes_of_1(answer, draw):
    ordinary = torch.bfloat16, torch.uint8, torch.float64
    for dtype in (*ordinary, torch.bool, torch.complex64):
        otherwise = None if dtype in ordinary else "dtype-table"
        _check_size(answer, torch.zeros(draw.integer(2, 6), 5, dtype=dtype), otherwise)


@size.requires("a view of a larger tensor")
def a_view_of_a_larger_tensor(answer, draw):
    _check_size(answer, draw.tensor(8, 10)[2:5, : draw.integer(3, 7)])


@size.requires("an expanded tensor")
def an_expanded_tensor(answer, draw):
    _check_size(answer, draw.tensor(draw.integer(2, 6), 1).expand(-1, draw.integer(3, 7)))


@size.requires("a single number and an empty tensor")
def a_single_number_and_an_empty_tensor(answer, draw):
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
