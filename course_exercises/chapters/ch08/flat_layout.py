"""Exercise 8.3, `FlatLayout`: what it asks for, and how it is checked."""

import contextlib
import math

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, same
from course_exercises.chapters.ch08.shared import drawn_tensors, shard_size

layout = Exercise(
    "8.3",
    "FlatLayout",
    points=2,
    minutes=25,
    kind="core",
    hints=[
        (
            "Add up the elements of all shapes, divide by the number of ranks and round up. That many "
            "times the number of ranks is the vector's length."
        ),
        (
            "Slices, `split`, `view` and `unbind` give views, `cat` and `stack` give copies. Which of the "
            "three methods may copy?"
        ),
        (
            "Get a vector of zeros with the tensors' dtype, and copy each tensor into its place: "
            "`unflatten` gives the places. The shards are the rows of the vector seen as a matrix with "
            "one row a rank."
        ),
    ],
    misconceptions={
        "rounded-down": "A shard is rounded down: the last elements belong to no rank. Round up, and pad.",
        "padded-each": "Every tensor is padded by itself. Lay all of them end to end first, and pad once.",
        "padded-too-much": "The vector is longer than it must be. Where the sizes divide, there is nothing "
        "to pad.",
        "not-padded": "The vector is as long as the tensors together: zeros are missing at the end.",
        "padding-not-zero": "The padding is not zero. It takes part in sums and in updates of an "
        "optimizer: memory from `torch.empty` may hold anything.",
        "padded-in-front": "The zeros are in front. The tensors come first, the padding at the end.",
        "strided": "Each rank gets every n-th element. Asked are consecutive ones: n equal pieces of the "
        "vector, one after the other.",
        "padding-returned": "The zeros at the end come out as part of the last tensor. `unflatten` gives each "
        "tensor as many elements as its shape has, and leaves the rest.",
        "too-few-shards": "There are not as many shards as ranks. `chunk` and `split` round up, and may "
        "give fewer pieces than you asked for.",
        "shard-sizes": "A shard has more or fewer elements than `shard_size`. Shards are equal pieces of the "
        "whole vector, one for each rank, with its zeros.",
        "shards-copied": "A shard is a copy. What an all-gather writes into the shards must be in the "
        "vector.",
        "tensors-copied": "What comes out is a copy. `unflatten` returns views: what is written into the "
        "vector later must be in the tensors.",
        "flatten-aliases": "`flatten` returns a vector in the memory of a tensor that was handed in. Asked "
        "is a new one.",
        "buffer-kept": "Two calls of `flatten` return the same memory: the second overwrites what the first has "
        "returned. Make a new vector in each.",
        "last-flatten": "`shards` or `unflatten` goes by what the last `flatten` has noted. The shapes alone tell "
        "where everything lies, and the vector is the argument: an all-gather fills one that no "
        "`flatten` has made.",
        "input-changed": "You have changed what was handed in: the tensors, as `a.copy_(b)` writes into "
        "`a`, the list of them, or that of the shapes.",
        "dtype-lost": "The vector has another dtype than the tensors.",
        "device-lost": "The zeros are on another device than the tensors: `torch.zeros` makes them on the "
        "CPU. A vector of GPU's tensors belongs on that GPU.",
        "not-contiguous": "A tensor that is not contiguous, such as a transposed one, has no flat view. "
        "Row-major order is that of its indices: `flatten()` and `copy_` know it.",
        "scalars": "A tensor without dimensions has the shape () and one element.",
        "no-elements": "A shape may have a 0 in it. Such a tensor has no elements, and takes no place.",
        "dimensions-left-out": "A shape may have any number of dimensions: its elements are the product of all "
        "of them, which is `shape.numel()`.",
    },
)


def _sizes(shapes: list[tuple[int, ...]]) -> list[int]:
    return [math.prod(shape) for shape in shapes]


def _laid_out(answer, shapes: list[tuple[int, ...]], ranks: int):
    handed = [torch.Size(shape) for shape in shapes]
    made = answer(handed, ranks)
    if len(handed) != len(shapes):
        got = f"{len(handed)} shapes in it"
        raise Wrong("input-changed", expected=f"the list of {len(shapes)} shapes", got=got)
    return made


class _EmptyIsNaN(TorchFunctionMode):
    """Within the block, memory from `torch.empty` holds NaN, and not by chance zeros."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        new = getattr(function, "__name__", "").removeprefix("new_").startswith("empty")
        return made.fill_(math.nan) if new and made.is_floating_point() else made


def _check_layout(answer, tensors: list[Tensor], ranks: int) -> None:
    """Goes through size, vector, shards and tensors of one layout."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    sizes = _sizes(shapes)
    size = shard_size(sum(sizes), ranks)
    made = _laid_out(answer, shapes, ranks)
    _check_shard_size(made.shard_size, shapes, ranks)
    joined = torch.cat([tensor.flatten() for tensor in tensors])
    flat = made.flatten(tensors)
    expect_type(flat, Tensor)
    if len(tensors) != len(shapes):
        got = f"{len(tensors)} tensors in it"
        raise Wrong("input-changed", expected=f"the list of {len(shapes)} tensors", got=got)
    if not same(torch.cat([tensor.flatten() for tensor in tensors]), joined):
        raise Wrong(
            "input-changed", expected="the tensors as they were", got="other values in them"
        )
    padding = joined.new_zeros(ranks * size - len(joined))
    likely = {
        "dtype-lost": lambda got: got.dtype != joined.dtype,
        "tensors-copied": lambda got: len(got) == ranks * size and not got.any(),
        "not-padded": lambda got: len(padding) > 0 and same(got, joined),
        "padded-in-front": torch.cat([padding, joined]),
        "padding-not-zero": lambda got: (
            len(got) == ranks * size and same(got[: len(joined)], joined)
        ),
        "padded-too-much": lambda got: len(got) > ranks * size,
        "not-contiguous": any(not tensor.is_contiguous() for tensor in tensors),
    }
    expect(flat, torch.cat([joined, padding]), what="the vector", likely=likely)
    shards = made.shards(flat)
    expect_type(shards, (list, tuple))
    likely = {
        "too-few-shards": lambda got: len(got) < ranks,
        "strided": [flat[rank::ranks] for rank in range(ranks)],
        "shard-sizes": lambda got: any(len(shard) != size for shard in got),
    }
    expect(list(shards), list(flat.view(ranks, size)), each="rank", likely=likely)
    back = made.unflatten(flat)
    expect_type(back, (list, tuple))
    likely = {"padding-returned": lambda got: got[-1].numel() > sizes[-1]}
    expect(list(back), tensors, each="tensor", what="unflatten", likely=likely)


def _check_shard_size(got, shapes: list[tuple[int, ...]], ranks: int) -> None:
    sizes = _sizes(shapes)
    total = sum(sizes)
    likely = {
        "no-elements": 0 in sizes and shard_size(total + sizes.count(0), ranks),
        "rounded-down": total % ranks > 0 and total // ranks,
        "padded-each": sum(shard_size(size, ranks) for size in sizes),
        "padded-too-much": lambda got: got > shard_size(total, ranks),
        "dimensions-left-out": any(len(shape) > 2 for shape in shapes),
    }
    expect(got, shard_size(total, ranks), what="shard_size", likely=likely)


@layout.requires("tensors that divide evenly come back, and nothing is padded")
def tensors_that_divide_evenly_come_back(answer, draw):
    ranks = draw.integer(2, 4)
    _check_layout(answer, drawn_tensors(draw, [(ranks, 3), (2, 2, ranks), (ranks,)]), ranks)


@layout.requires("tensors that do not divide are padded once, with zeros, at the end", at_home=True)
def tensors_that_do_not_divide_are_padded_once(answer, draw):
    # each tensor has one element more than divides: to pad each by itself makes another size
    awkward = [([(3, 7), (5,), (1, 3, 3)], 4), ([(3, 7), (11,), (2, 1, 3)], 5)]
    shapes, ranks = draw.choice([*awkward, ([(5, 5), (7,), (13, 1)], 6)])
    with _EmptyIsNaN():
        _check_layout(answer, drawn_tensors(draw, shapes), ranks)
        _check_layout(answer, drawn_tensors(draw, [(draw.choice((2, 4, 5)), 3), (5,)]), 7)
        # the last shard is padding only
        _check_layout(answer, drawn_tensors(draw, [(2, 3), (1,)]), 5)


@layout.requires("shards and tensors are views into the vector, and the vector is new")
def shards_and_tensors_are_views_into_the_vector(answer, draw):
    tensors = drawn_tensors(draw, [(3, draw.integer(4, 6)), (7,)])
    shapes = [tuple(tensor.shape) for tensor in tensors]
    ranks = draw.integer(3, 5)
    made = _laid_out(answer, shapes, ranks)
    flat = made.flatten(tensors)
    places = made.unflatten(flat)
    if any(t.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr() for t in places):
        raise Wrong("tensors-copied", expected="views into the vector", got="memory of their own")
    if made.flatten(tensors).untyped_storage().data_ptr() == flat.untyped_storage().data_ptr():
        raise Wrong("buffer-kept", expected="a new vector", got="that of the call before")
    for shard in made.shards(flat):
        shard.fill_(7.0)
    if not bool((flat == 7.0).all()):
        raise Wrong("shards-copied", expected="a write into a shard to change the vector", got=flat)
    single = draw.tensor(8)
    made = _laid_out(answer, [(8,)], 2)
    made.flatten([single]).fill_(7.0)
    if bool((single == 7.0).all()):
        got = "a write into the vector has changed the tensor"
        raise Wrong("flatten-aliases", expected="a vector with memory of its own", got=got)


@layout.requires(
    "a vector that no `flatten` has made",
    needs_earlier=True,
    failures={"AttributeError": "last-flatten", "TypeError": "last-flatten"},
)
def a_vector_that_no_flatten_has_made(answer, draw):
    shapes, ranks = [(draw.integer(2, 4), 5), (3,)], draw.integer(3, 5)
    used = _laid_out(answer, shapes, ranks)
    used.flatten(drawn_tensors(draw, shapes))
    flat = draw.tensor(ranks * shard_size(sum(_sizes(shapes)), ranks))
    parts = flat[: sum(_sizes(shapes))].split(_sizes(shapes))
    expected = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    for made in (used, _laid_out(answer, shapes, ranks)):
        likely = {"last-flatten": True}
        tensors, shards = list(made.unflatten(flat)), list(made.shards(flat))
        expect(tensors, expected, each="tensor", what="unflatten", likely=likely)
        expect(shards, list(flat.view(ranks, -1)), each="rank", what="shards", likely=likely)


@layout.requires(
    "more ranks than elements, and tensors without any",
    failures={"exception": "too-few-shards"},
    needs_earlier=True,
)
def more_ranks_than_elements(answer, draw):
    _check_layout(answer, drawn_tensors(draw, [(2, 1)]), draw.integer(3, 6))
    _check_layout(answer, drawn_tensors(draw, [(1, 2), (draw.integer(1, 3),)]), 7)
    _check_layout(answer, drawn_tensors(draw, [(2, 4), (0, draw.integer(2, 4)), (4,)]), 4)


@layout.requires(
    "a tensor without dimensions, and one rank",
    failures={"exception": "scalars"},
    needs_earlier=True,
)
def a_tensor_without_dimensions(answer, draw):
    _check_layout(answer, drawn_tensors(draw, [(), (2, draw.integer(2, 5))]), 2)
    _check_layout(answer, drawn_tensors(draw, [(2, 3), ()]), 1)


@layout.requires(
    "bfloat16, and tensors that are not contiguous", failures={"exception": "not-contiguous"}
)
def bfloat16_and_tensors_that_are_not_contiguous(answer, draw):
    ranks = draw.integer(2, 4)
    _check_layout(answer, drawn_tensors(draw, [(3, 4), (5,)], torch.bfloat16), ranks)
    _check_layout(answer, [draw.tensor(3, 4).T, draw.tensor(6)[::2]], ranks)


@layout.requires(
    "the vector is on the tensors' device",
    at_home=True,
    failures={"device meta": "device-lost"},
)
def the_vector_is_on_the_tensors_device(answer, draw):
    tensors = drawn_tensors(draw, [(3, 4), (draw.integer(2, 6),)])
    made = _laid_out(answer, [tuple(tensor.shape) for tensor in tensors], 5)
    flat = None
    # What names no device comes to meta, as beside a GPU to the CPU. From there nothing comes back:
    # an answer that moves it to the tensors' device, or reads sizes from it, is right all the same.
    with torch.device("meta"), contextlib.suppress(NotImplementedError):
        flat = made.flatten(tensors)
        expect_type(flat, Tensor)
    if flat is not None and flat.device != tensors[0].device:
        raise Wrong("device-lost", expected="the tensors' device", got="PyTorch's default device")
