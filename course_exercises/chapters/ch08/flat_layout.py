"""Exercise 8.3, `FlatLayout`: what it asks for, and how it is checked."""

import contextlib
import math

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, same
from course_exercises.authoring.ranks import storages
from course_exercises.chapters.ch08.shared import drawn_tensors, shard_size

layout = Exercise(
    "8.3",
    "FlatLayout",
    points=2,
    minutes=25,
    kind="core",
    things="tensors",
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
        "size": "`shard_size` is another than all tensors need together. Add up the elements of all shapes, each the "
        "product of all its dimensions (one for (), none where there is a 0), divide by the number of ranks, and "
        "round up: once, not for each tensor.",
        "padding": "The vector is not the tensors, end to end, with zeros behind. It has world_size * shard_size "
        "elements; the rest behind the last tensor is zero, since it takes part in sums, and memory from "
        "`torch.empty` may hold anything.",
        "not-flat": "The vector has not the tensors end to end, each in row-major order, which is the order of its "
        "indices. One that is transposed or cut out has no flat view: `flatten()` and `copy_` know that order, "
        "`view` and the memory do not.",
        "wrong-shards": "The shards are not world_size pieces of the vector, one after the other, each with "
        "`shard_size` elements and the zeros among them. `chunk` and `split` may give fewer pieces.",
        "wrong-tensors": "`unflatten` gives other tensors than were laid in. Give each as many elements as its shape "
        "has, all dimensions of it multiplied (one for (), none where there is a 0), and leave the zeros.",
        "copied": "What comes out is a copy. `shards` and `unflatten` return views: what an all-gather writes into the "
        "shards has to be in the vector, and so in the tensors.",
        "flatten-aliases": "`flatten` returns memory that is not new: that of a tensor that was handed in, or that of "
        "the call before, whose result it overwrites. Make a new vector in each call.",
        "last-flatten": "`shards` or `unflatten` goes by what the last `flatten` has noted. The shapes alone tell "
        "where everything lies, and the vector is the argument: an all-gather fills one that no "
        "`flatten` has made.",
        "device-lost": "The zeros are on another device than the tensors: `torch.zeros` makes them on the "
        "CPU. A vector of GPU's tensors belongs on that GPU.",
    },
)


def _sizes(shapes: list[tuple[int, ...]]) -> list[int]:
    return [math.prod(shape) for shape in shapes]


def _laid_out(answer, shapes: list[tuple[int, ...]], ranks: int):
    handed = [torch.Size(shape) for shape in shapes]
    made = answer(handed, ranks)
    expect(len(handed), len(shapes), what="shapes in the list", likely={"input-changed": True})
    return made


class _EmptyIsNaN(TorchFunctionMode):
    """Within the block, memory from `torch.empty` holds NaN, and not by chance zeros."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        new = getattr(function, "__name__", "").removeprefix("new_").startswith("empty")
        return made.fill_(math.nan) if new and made.is_floating_point() else made


def _check(answer, tensors: list[Tensor], ranks: int) -> None:
    """Goes through size, vector, shards and tensors of one layout."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    made = _laid_out(answer, shapes, ranks)
    size = shard_size(sum(_sizes(shapes)), ranks)
    what = f"shard_size of {', '.join(map(str, shapes))} on {ranks} ranks"
    expect(made.shard_size, size, what=what, likely={"size": True})
    flat = _flattened(made, tensors, ranks * size)
    shards, back = made.shards(flat), made.unflatten(flat)
    expect_type(shards, (list, tuple))
    likely = {"wrong-shards": True}
    expect(list(shards), list(flat.view(ranks, size)), each="rank", what="shards", likely=likely)
    expect_type(back, (list, tuple))
    likely = {"wrong-tensors": True}
    expect(list(back), tensors, each="tensor", what="unflatten", likely=likely)


def _flattened(made, tensors: list[Tensor], length: int) -> Tensor:
    joined, handed = torch.cat([tensor.flatten() for tensor in tensors]), list(tensors)
    n, flat = len(joined), made.flatten(handed)
    expect_type(flat, Tensor)
    likely = {"input-changed": True}
    expect(len(handed), len(tensors), what="tensors in the list", likely=likely)
    after = torch.cat([tensor.flatten() for tensor in tensors])
    expect(after, joined, what="the tensors handed in", likely=likely)
    likely = {
        "other-dtype": lambda got: got.dtype != joined.dtype,
        "padding": lambda got: (
            len(got) != length or same(got[:n], joined) or same(got[length - n :], joined)
        ),
        "copied": lambda got: not got.any(),  # it has written into copies
        "not-flat": True,
    }
    padded = torch.cat([joined, joined.new_zeros(length - n)])
    expect(flat, padded, what="the vector", likely=likely)
    return flat


@layout.requires("tensors that divide evenly come back, and nothing is padded")
def tensors_that_divide_evenly_come_back(answer, draw):
    ranks = draw.integer(2, 4)
    _check(answer, drawn_tensors(draw, [(ranks, 3), (2, 2, ranks), (ranks,)]), ranks)


@layout.requires("tensors that do not divide are padded once, with zeros, at the end", at_home=True)
def tensors_that_do_not_divide_are_padded_once(answer, draw):
    # each tensor has one element more than divides: to pad each by itself makes another size
    awkward = [([(3, 7), (5,), (1, 3, 3)], 4), ([(3, 7), (11,), (2, 1, 3)], 5)]
    shapes, ranks = draw.choice([*awkward, ([(5, 5), (7,), (13, 1)], 6)])
    with _EmptyIsNaN():
        _check(answer, drawn_tensors(draw, shapes), ranks)
        _check(answer, drawn_tensors(draw, [(draw.choice((2, 4, 5)), 3), (5,)]), 7)
        # the last shard is padding only
        _check(answer, drawn_tensors(draw, [(2, 3), (1,)]), 5)


@layout.requires("shards and tensors are views into the vector, and the vector is new")
def shards_and_tensors_are_views_into_the_vector(answer, draw):
    tensors = drawn_tensors(draw, [(3, draw.integer(4, 6)), (7,)])
    made = _laid_out(answer, [tuple(tensor.shape) for tensor in tensors], draw.integer(3, 5))
    flat = made.flatten(tensors)
    if storages([*made.unflatten(flat), *made.shards(flat)]) != storages([flat]):
        raise Wrong("copied", expected="views into the vector", got="memory of their own")
    if storages([made.flatten(tensors)]) == storages([flat]):
        raise Wrong("flatten-aliases", expected="a new vector", got="that of the call before")
    single = draw.tensor(8)
    if storages([_laid_out(answer, [(8,)], 2).flatten([single])]) == storages([single]):
        expected, got = "a vector with memory of its own", "the memory of the tensor"
        raise Wrong("flatten-aliases", expected=expected, got=got)


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
    failures={"IndexError": "wrong-shards"},
    needs_earlier=True,
)
def more_ranks_than_elements(answer, draw):
    _check(answer, drawn_tensors(draw, [(2, 1)]), draw.integer(3, 6))
    _check(answer, drawn_tensors(draw, [(1, 2), (draw.integer(1, 3),)]), 7)
    _check(answer, drawn_tensors(draw, [(2, 4), (0, draw.integer(2, 4)), (4,)]), 4)


@layout.requires(
    "a tensor without dimensions, and one rank",
    failures={"exception": "wrong-tensors"},
    needs_earlier=True,
)
def a_tensor_without_dimensions(answer, draw):
    _check(answer, drawn_tensors(draw, [(), (2, draw.integer(2, 5))]), 2)
    _check(answer, drawn_tensors(draw, [(2, 3), ()]), 1)


@layout.requires(
    "bfloat16, and tensors that are not contiguous", failures={"exception": "not-flat"}
)
def bfloat16_and_tensors_that_are_not_contiguous(answer, draw):
    ranks = draw.integer(2, 4)
    _check(answer, drawn_tensors(draw, [(3, 4), (5,)], torch.bfloat16), ranks)
    _check(answer, [draw.tensor(3, 4).T, draw.tensor(6)[::2]], ranks)


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
