"""Answers to 0.2, `message_bytes`: wrong in a plausible way, or right in another."""

import io
import math
import sys

import torch

from tests.wrong_answers import right, wrong


@wrong("0.2", names="values-not-bytes")
def counts_values(tensor):
    return tensor.numel()


@wrong("0.2", names="four-bytes")
def everything_is_float32(tensor):
    return 4 * tensor.numel()


@wrong("0.2", names="first-dimension")
def counts_rows(tensor):
    return (len(tensor) if tensor.dim() else 1) * tensor.element_size()


@wrong("0.2", names="bits-not-bytes")
def counts_bits(tensor):
    return 8 * tensor.numel() * tensor.element_size()


@wrong("0.2", names="whole-storage")
def measures_the_storage(tensor):
    return tensor.untyped_storage().nbytes()


@wrong("0.2", names="python-object")
def asks_python(tensor):
    return sys.getsizeof(tensor)


@wrong("0.2", names="one-value")
def measures_one_value(tensor):
    return tensor.element_size()


@wrong("0.2", names="dimensions-added")
def adds_the_dimensions(tensor):
    return sum(tensor.shape) * tensor.element_size()


@wrong("0.2", names="two-dimensions")
def counts_rows_and_columns(tensor):
    return tensor.shape[0] * tensor.shape[1] * tensor.element_size()


@wrong("0.2", names="dimensions-counted")
def counts_the_dimensions(tensor):
    return tensor.dim() * tensor.element_size()


@wrong("0.2", names="divided-by-eight")
def takes_element_size_for_bits(tensor):
    return tensor.numel() * tensor.element_size() // 8


@wrong("0.2", names="divided-by-eight")
def takes_values_for_bits(tensor):
    return tensor.numel() // 8


@wrong("0.2", names="first-dimension")
def takes_len_for_the_number_of_values(tensor):
    return len(tensor) * tensor.itemsize


@wrong("0.2", names="not-in-bytes")
def counts_kilobytes(tensor):
    return tensor.numel() * tensor.element_size() / 1024


@wrong("0.2", names="not-a-whole-number")
def divides_the_bits(tensor):
    return tensor.numel() * tensor.element_size() * 8 / 8


@wrong("0.2", names="shape-not-number")
def takes_the_shape_for_a_number(tensor):
    return tensor.size() * tensor.element_size()


@wrong("0.2", names="not-called")
def forgets_the_brackets(tensor):
    return tensor.numel * tensor.element_size


@wrong("0.2", names="dtype-no-number")
def multiplies_by_the_dtype(tensor):
    return tensor.numel() * tensor.dtype


@wrong("0.2", names="floats-only")
def asks_finfo(tensor):
    return tensor.numel() * torch.finfo(tensor.dtype).bits // 8


@wrong("0.2", names="dtype-table")
def looks_it_up(tensor):
    return tensor.numel() * {torch.float32: 4, torch.float64: 8, torch.float16: 2}[tensor.dtype]


@wrong("0.2", names="numpy-lacks-dtypes")
def asks_numpy(tensor):
    return tensor.numpy().nbytes


@wrong("0.2", names="returns-nothing")
def prints_it(tensor):
    print(tensor.nbytes)


@right("0.2")
def asks_the_tensor(tensor):
    return tensor.nbytes


@wrong("0.2", names="half-a-complex")
def asks_finfo_for_complex_numbers_too(tensor):
    if tensor.dtype == torch.bool:
        return tensor.numel()
    floating = tensor.is_floating_point() or tensor.is_complex()
    info = torch.finfo(tensor.dtype) if floating else torch.iinfo(tensor.dtype)
    return tensor.numel() * info.bits // 8


@wrong("0.2", names="bool-as-a-bit")
def packs_bools(tensor):
    return math.ceil(tensor.numel() / 8) if tensor.dtype == torch.bool else tensor.nbytes


@wrong("0.2", names="whole-storage")
def from_the_first_value_to_the_last(tensor):
    steps = sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape))
    return (steps + 1) * tensor.element_size() if tensor.numel() else 0


@wrong("0.2", names="no-dimensions-no-value")
def goes_through_the_rows(tensor):
    return sum(row.nbytes for row in tensor) if tensor.dim() else 0


@wrong("0.2", names="empty-holds-none")
def counts_one_value_at_least(tensor):
    return max(tensor.numel(), 1) * tensor.element_size()


@wrong("0.2", names="memory-not-values")
def counts_an_expanded_size_once(tensor):
    sizes = [size for size, step in zip(tensor.shape, tensor.stride()) if step or not size]
    return math.prod(sizes) * tensor.element_size()


@wrong("0.2", names="zeros-count")
def counts_what_is_not_zero(tensor):
    return int(tensor.count_nonzero()) * tensor.element_size()


@wrong("0.2", names="rows-by-stride")
def multiplies_rows_and_stride(tensor):
    rows = tensor.shape[0] * tensor.stride(0) if tensor.dim() else 1
    return rows * tensor.element_size()


@wrong("0.2", names="other-than-values")
def measures_a_file(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.tell()


@wrong("0.2", names="four-bytes")
def knows_two_sizes(tensor):
    return tensor.numel() * (4 if tensor.is_floating_point() else 8)


@wrong("0.2", names="dtype-table")
def asks_iinfo_for_a_bool(tensor):
    info = torch.finfo if tensor.is_floating_point() else torch.iinfo
    return tensor.numel() * info(tensor.dtype).bits // 8


@right("0.2")
def counts_the_bytes_of_a_copy(tensor):
    return tensor.contiguous().view(-1).clone().untyped_storage().nbytes()


@right("0.2")
def multiplies_sizes_and_itemsize(tensor):
    return math.prod(tensor.shape) * tensor.dtype.itemsize
