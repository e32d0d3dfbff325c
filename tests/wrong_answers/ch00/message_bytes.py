"""Answers to 0.2, `message_bytes`: wrong in a plausible way, or right in another."""

import io
import math

import torch

from tests.wrong_answers import right, wrong


@wrong("0.2", names="bytes-of-a-value")
def everything_is_float32(tensor):
    return 4 * tensor.numel()


@wrong("0.2", names="other-unit")
def counts_bits(tensor):
    return 8 * tensor.numel() * tensor.element_size()


@wrong("0.2", names="memory-not-values")
def measures_the_storage(tensor):
    return tensor.untyped_storage().nbytes()


@wrong("0.2", names="one-value")
def measures_one_value(tensor):
    return tensor.element_size()


@wrong("0.2", names="number-of-values")
def takes_len_for_the_number_of_values(tensor):
    return len(tensor) * tensor.itemsize


@wrong("0.2", names="not-a-whole-number")
def divides_the_bits(tensor):
    return tensor.numel() * tensor.element_size() * 8 / 8


@wrong("0.2", names="not-called")
def forgets_the_brackets(tensor):
    return tensor.numel * tensor.element_size


@wrong("0.2", names="bytes-of-a-value")
def asks_finfo(tensor):
    return tensor.numel() * torch.finfo(tensor.dtype).bits // 8


@right("0.2")
def asks_the_tensor(tensor):
    return tensor.nbytes


@wrong("0.2", names="number-of-values")
def counts_an_expanded_size_once(tensor):
    sizes = [size for size, step in zip(tensor.shape, tensor.stride()) if step or not size]
    return math.prod(sizes) * tensor.element_size()


@wrong("0.2", names="memory-not-values")
def measures_a_file(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.tell()


@right("0.2")
def counts_the_bytes_of_a_copy(tensor):
    return tensor.contiguous().view(-1).clone().untyped_storage().nbytes()


@right("0.2")
def multiplies_sizes_and_itemsize(tensor):
    return math.prod(tensor.shape) * tensor.dtype.itemsize
