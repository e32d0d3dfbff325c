"""Results of an answer as plain data: what is alike on both sides, and what is refused."""

import collections
import enum
import json
import math
from pathlib import Path

import numpy
import pytest
import torch

from course_exercises.authoring.compare import same
from course_grader.plain import Reader, Writer
from course_planner import Layout
from course_utils.lesson.schedules import Op


def through(*values, keep=lambda value: 7, handle=lambda number, name: (number, name)):
    reader = Reader(Writer(keep).dump(*values), handle)
    made = [reader.value(tree) for tree in reader.trees]
    return made[0] if len(made) == 1 else made


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, -(10**30), 2.5, math.inf, "text \ud800", b"\x00", 1 + 2j, range(1, 9, 2)),
        *([1, [2.0]], (1, "a"), {"a": 1, 2: [3]}, {1, 2}, frozenset({3}), collections.deque([1])),
        *(Path("a/b"), torch.float16, torch.device("cpu"), numpy.float32(1.5), numpy.int64(3)),
    ],
    ids=repr,
)
def test_plain_values_come_as_they_are(value):
    got = through(value)
    assert got == value
    assert type(got) is type(value) or isinstance(value, Path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_tensors_come_as_they_are(dtype):
    whole = torch.arange(24).reshape(4, 6).to(dtype)
    for tensor in (whole, whole.T, whole[1:3, ::2], whole[0, 0], whole[:0], whole[:1].expand(3, 6)):
        got = through(tensor)
        assert torch.equal(got, tensor)
        assert (got.dtype, got.stride()) == (tensor.dtype, tensor.stride())


def test_what_is_shared_is_shared_again():
    tensor, entries = torch.zeros(3), [1]
    a, b, c, d = through(tensor, tensor[1:], entries, [entries])
    a[1] = 5
    assert b[0] == 5
    assert d[0] is c


def test_a_result_that_is_a_part_of_an_argument_is_that_part_here():
    mine = torch.zeros(4)
    theirs = torch.zeros(4)
    theirs += 1
    reader = Reader(Writer(lambda value: 0).dump([theirs], theirs[2:]), lambda *_: None)
    changed, result = reader.trees
    reader.replace(mine, changed[2][0])
    assert torch.equal(mine, torch.ones(4))
    reader.value(result).fill_(9)
    assert mine.tolist() == [1, 1, 9, 9]


def test_what_is_frozen_stays_as_it_was():
    mine, theirs = Layout(tp=3), Layout(tp=3)
    object.__setattr__(theirs, "tp", 1)
    [tree] = (reader := Reader(Writer(lambda value: 0).dump(theirs), lambda *_: None)).trees
    assert tree[0] == "record"
    assert reader.replace(mine, tree) is mine
    assert mine == Layout(tp=3)


def test_an_argument_whose_elements_share_memory_stays_as_it_is():
    mine = torch.arange(3.0)[:, None].expand(-1, 4)
    reader = Reader(Writer(lambda value: 0).dump(mine), lambda *_: None)
    assert reader.replace(mine, reader.trees[0]) is mine


class Liar(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


class LyingList(list):
    def __eq__(self, other):
        return True

    __hash__ = None


class LyingTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return True


def test_what_lies_about_being_equal_comes_as_what_it_is():
    assert not same(through(Liar(3)), 4)
    assert type(through(LyingList([1]))) is list
    assert not same(through(torch.zeros(2).as_subclass(LyingTensor)), torch.ones(2))


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [object(), Colour.RED, torch.nn.Linear(1, 1), len, (x for x in ())],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_a_handle(value):
    assert through(value) == (7, type(value).__name__)


def test_records_of_the_course_come_as_they_are():
    record = Op("F", 1)
    assert through([record]) == [record]
    assert type(through(record)) is Op


def message(tree, *blobs):
    head = json.dumps([[tree], [len(blob) for blob in blobs]]).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(blobs)


@pytest.mark.parametrize(
    "forged",
    [
        *(b"", b"\x00" * 8, message(["no such tag"]), message({"a": 1}), message(["list", 0, 5])),
        message(["record", 0, "os", "stat_result", []]),
        message(["record", 0, "course_utils.launch.story.failure", "RankFailure", []]),
        message(["enum", "builtins", "list", "append"]),
        message(["tensor", 0, 0, "float32", 0, [9], [1], False, False], bytes(16)),
        message(["tensor", 0, 0, "float32", 0, [4], [-1], False, False], bytes(16)),
        message(["tensor", 0, 0, "float32", 0, [2**40], [0], False, False], bytes(4)),
        message(["tensor", 0, 0, "nn", 0, [1], [1], False, False], bytes(16)),
        message(["number", "O", 0], bytes(8)),
        message(["word", "torch.load"]),
        message(["again", 3]),
        b"\xff" * 100,
    ],
)
def test_what_no_worker_writes_is_refused(forged):
    with pytest.raises(ValueError, match="."):
        reader = Reader(forged, lambda *_: None)
        for tree in reader.trees:
            reader.value(tree)
