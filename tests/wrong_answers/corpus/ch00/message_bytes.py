"""Rarer wrong answers to 0.2, `message_bytes`."""

import math
import sys

import torch

from tests.wrong_answers import rarer


@rarer("0.2")
def counts_values(tensor):
    return tensor.numel()


@rarer("0.2")
def counts_rows(tensor):
    return (len(tensor) if tensor.dim() else 1) * tensor.element_size()


@rarer("0.2")
def asks_python(tensor):
    return sys.getsizeof(tensor)


@rarer("0.2")
def adds_the_dimensions(tensor):
    return sum(tensor.shape) * tensor.element_size()


@rarer("0.2")
def counts_rows_and_columns(tensor):
    return tensor.shape[0] * tensor.shape[1] * tensor.element_size()


@rarer("0.2")
def counts_the_dimensions(tensor):
    return tensor.dim() * tensor.element_size()


@rarer("0.2")
def takes_element_size_for_bits(tensor):
    return tensor.numel() * tensor.element_size() // 8


@rarer("0.2")
def takes_values_for_bits(tensor):
    return tensor.numel() // 8


@rarer("0.2")
def counts_kilobytes(tensor):
    return tensor.numel() * tensor.element_size() / 1024


@rarer("0.2")
def takes_the_shape_for_a_number(tensor):
    return tensor.size() * tensor.element_size()


@rarer("0.2")
def multiplies_by_the_dtype(tensor):
    return tensor.numel() * tensor.dtype


@rarer("0.2")
def looks_it_up(tensor):
    return tensor.numel() * {torch.float32: 4, torch.float64: 8, torch.float16: 2}[tensor.dtype]


@rarer("0.2")
def asks_numpy(tensor):
    return tensor.numpy().nbytes


@rarer("0.2")
def prints_it(tensor):
    print(tensor.nbytes)


@rarer("0.2")
def asks_finfo_for_complex_numbers_too(tensor):
    if tensor.dtype == torch.bool:
        return tensor.numel()
    floating = tensor.is_floating_point() or tensor.is_complex()
    info = torch.finfo(tensor.dtype) if floating else torch.iinfo(tensor.dtype)
    return tensor.numel() * info.bits // 8


@rarer("0.2")
def packs_bools(tensor):
    return math.ceil(tensor.numel() / 8) if tensor.dtype == torch.bool else tensor.nbytes


@rarer("0.2")
def from_the_first_value_to_the_last(tensor):
    steps = sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape))
    return (steps + 1) * tensor.element_size() if tensor.numel() else 0


@rarer("0.2")
def goes_through_the_rows(tensor):
    return sum(row.nbytes for row in tensor) if tensor.dim() else 0


@rarer("0.2")
def counts_one_value_at_least(tensor):
    return max(tensor.numel(), 1) * tensor.element_size()


@rarer("0.2")
def counts_what_is_not_zero(tensor):
    return int(tensor.count_nonzero()) * tensor.element_size()


@rarer("0.2")
def multiplies_rows_and_stride(tensor):
    rows = tensor.shape[0] * tensor.stride(0) if tensor.dim() else 1
    return rows * tensor.element_size()


@rarer("0.2")
def knows_two_sizes(tensor):
    return tensor.numel() * (4 if tensor.is_floating_point() else 8)


@rarer("0.2")
def asks_iinfo_for_a_bool(tensor):
    info = torch.finfo if tensor.is_floating_point() else torch.iinfo
    return tensor.numel() * info(tensor.dtype).bits // 8
