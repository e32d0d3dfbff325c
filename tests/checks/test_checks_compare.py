"""compare, expect, relation, show: where two values first differ, and which mistake explains it."""

import math

import pytest
import torch

from course_exercises.authoring.compare import (
    Wrong,
    compare,
    expect,
    expect_type,
    relation,
    same,
    show,
    tolerance_used,
)

T = torch.tensor


def test_a_value_is_judged_by_its_own_size():
    """Beside a thousand, a small entry may be off by no more than elsewhere."""
    assert compare(T([1000.0, 0.001]), T([1000.0, 0.0])) is not None
    assert tolerance_used(T([0.5]), T([1.0]), 0.5).item() == 0.5
    assert tolerance_used(T([1.0, math.nan]), T([1.0, 1.0]), 0.0)[0] == 0


EQUAL = [
    (T([1.0, 2.0]), T([1.0, 2.0 + 1e-6])),
    (T([1e6]), T([1e6 + 5.0])),
    (T([math.nan, math.inf]), T([math.nan, math.inf])),
    (T([1, 2]), T([1, 2])),
    (T([1.0], requires_grad=True), T([1.0])),
    (torch.zeros(0, 3), torch.zeros(0, 3)),
    (3, 3),
    (3.0, 3),
    (T(3), 3),
    (0.1 + 0.2, 0.3),
    (math.inf, math.inf),
    (True, True),
    (T(True), True),
    ("abc", "abc"),
    ([1, 2], (1, 2)),
    (range(3), [0, 1, 2]),
    ({"a": [1, T([1.0])]}, {"a": [1, T([1.0])]}),
    ({1, 2}, {2, 1}),
    (None, None),
    (torch.float32, torch.float32),
    (torch.Size([2, 3]), (2, 3)),
]


@pytest.mark.parametrize(("got", "expected"), EQUAL)
def test_equal_values_have_no_difference(got, expected):
    assert compare(got, expected) is None
    expect(got, expected)


# what came, what was expected; then what the learner reads as expected, got, and the place
DIFFERENT = [
    (T([1.0, 3.0]), T([1.0, 2.0]), "2", "3", "at [1]; 1 of 2 values differ"),
    (T([[1, 2], [3, 5]]), T([[1, 2], [3, 4]]), "4", "5", "at [1, 1]; 1 of 4 values differ"),
    (T(2.0), T(1.0), "1", "2", ""),
    (T([math.nan]), T([1.0]), "1", "nan", "at [0]"),
    (T([1.0001]), T([1.0]), "1", "1.0001", "at [0]"),
    (torch.zeros(3, 2), torch.zeros(2, 3), "shape (2, 3)", "shape (3, 2)", ""),
    (T([1.0]).double(), T([1.0]), "torch.float32", "torch.float64", ""),
    ([1.0, 2.0], T([1.0, 2.0]), "tensor([1, 2])", "[1, 2]", ""),
    (None, torch.zeros(4, 4), "tensor of shape (4, 4)", "None", ""),
    (4, 3, "3", "4", ""),
    (0.5, 0.25, "0.25", "0.5", ""),
    (2887778304, 3.6e8, "3.6e+08", "2.888e+09", ""),  # in one notation
    (1, True, "True", "1", ""),
    (True, 1, "1", "True", ""),
    ("3", 3, "3", "'3'", ""),
    (3 + 0j, "a", "'a'", "(3+0j)", ""),
    ([1, 2], [1, 2, 3], "3 entries: [1, 2, 3]", "2 entries: [1, 2]", ""),
    ([], [1], "1 entry: [1]", "0 entries: []", ""),
    ([1, 5], [1, 2], "2", "5", "item 1"),
    (7, [7], "[7]", "7", ""),
    ("ab", ["a", "b"], "['a', 'b']", "'ab'", ""),
    ([T([1.0]), T([2.0])], [T([1.0]), T([3.0])], "3", "2", "item 1, at [0]"),
    ({"a": 1}, {"a": 2}, "2", "1", "'a'"),
    ({}, {"a": 2}, "the keys ['a']", "without ['a']", ""),
    ({"a": 2, 4: 1}, {"a": 2}, "the keys ['a']", "also [4]", ""),
    ([1], {"a": 1}, "{'a': 1}", "[1]", ""),
    ({1, 2}, {1, 3}, "{1, 3}", "also {2}, without {3}", ""),
    ([1, 3], {1, 3}, "{1, 3}", "[1, 3]", ""),
    (T([1.0]), None, "None", "tensor([1])", ""),
]


@pytest.mark.parametrize(("got", "expected", "left", "right", "place"), DIFFERENT)
def test_the_first_difference_is_named(got, expected, left, right, place):
    difference = compare(got, expected)
    assert (difference.expected, difference.got, difference.place) == (left, right, place)


def test_the_line_says_which_rank_and_what():
    with pytest.raises(Wrong) as caught:
        expect([1.0, 3.0], [1.0, 1.0], each="rank", what="the loss")
    assert caught.value.expected == "1   (the loss, rank 1)"


def test_a_mistake_is_named_by_the_value_it_gives():
    likely = {"divided-twice": T([1.0]), "sum": T([4.0]), "also-sum": T([4.0])}
    with pytest.raises(Wrong) as caught:
        expect(T([4.0]), T([2.0]), likely=likely)
    assert caught.value.misconception == "sum"


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        (True, True),
        (False, False),
        (lambda got: got == 4, True),
        (lambda got: got.no_such_attribute, False),
        (4, True),
        (5, False),
        (4.0, True),
    ],
)
def test_a_mistake_is_a_value_a_bool_or_a_question(mistake, named):
    with pytest.raises(Wrong) as caught:
        expect(4, 2, likely={"it": mistake})
    assert caught.value.misconception == ("it" if named else None)


def test_likely_is_not_asked_when_the_answer_is_right():
    expect(2, 2, likely={"it": True})


def test_an_unknown_mistake_gets_a_remark():
    with pytest.raises(Wrong) as caught:
        expect(T([2.0, 4.0]), T([1.0, 2.0]))
    assert caught.value.got == "2   (every value is 2 times what is expected)"


RELATIONS = [
    (T([3.0, 6.0]), T([1.0, 2.0]), "every value is 3 times what is expected"),
    (T([0.5, 1.0]), T([1.0, 2.0]), "every value is 1/2 of what is expected"),
    (T([-1.0, -2.0]), T([1.0, 2.0]), "every value is minus what is expected"),
    (T([2.0, 1.0]), T([1.0, 2.0]), "the right values in another order"),
    (T([0.0, 0.0]), T([1.0, 2.0]), "every value is zero"),
    (T([math.nan, 0.0]), T([1.0, 2.0]), "not every value is finite"),
    ({"b": [4], "a": 2.0}, {"a": 1, "b": [2]}, "every value is 2 times what is expected"),
    ([3, 1], [1, 3], "the right values in another order"),
    ([[1, 3], [2, 4]], [[1, 2], [3, 4]], "the right values in another order"),
    ([[1, 3, 2], [4]], [[1, 2], [3, 4]], "the right values in other groups"),
    ([1.0, 2.0], T([1.0, 2.0]), ""),  # the order is right, only the kind is not
    (12, 4, "3 times what is expected"),
    (4, 12, "1/3 of what is expected"),
    (-4, 4, "minus what is expected"),
    (7, 4, ""),
    (0, 4, ""),
    (400, 4, "100 times what is expected"),
    (404, 4, ""),
    ([7, 7], [4, 4], ""),
    ([8, 8], [4, 4], "2 times what is expected"),
    (T([1.0, 5.0]), T([1.0, 2.0]), ""),
    (T([1.0, 5.0]), T([1.0]), ""),
    (1.0, 0.0, ""),
    ("a", "b", ""),
    (None, 3, ""),
    (torch.zeros(0), torch.zeros(0), ""),
]


@pytest.mark.parametrize(
    ("got", "named"),
    [(None, True), ([None, None], True), ([None, T([1.0])], False), ([], False), (2, False)],
)
def test_a_missing_return_is_named(got, named):
    for compared in (lambda: expect(got, T([1.0])), lambda: expect_type(got, torch.Tensor)):
        with pytest.raises(Wrong) as caught:
            compared()
        assert caught.value.misconception == ("returns-nothing" if named else None)


@pytest.mark.parametrize(("got", "expected", "remark"), RELATIONS)
def test_the_relation_of_all_values(got, expected, remark):
    assert relation(got, expected) == remark


def test_expect_type_says_what_should_have_come():
    expect_type([1], list)
    with pytest.raises(Wrong) as caught:
        expect_type(None, (list, torch.Tensor), likely="forgot")
    assert caught.value.expected == "a list or a Tensor"
    assert caught.value.got == "None"
    assert caught.value.misconception == "forgot"


class Hostile:
    def __eq__(self, other):
        raise RuntimeError

    def __repr__(self):
        raise RuntimeError

    __hash__ = None


def test_hostile_answers_are_shown_all_the_same():
    assert compare(Hostile(), "a").got == "an object of class Hostile"
    assert compare(Hostile(), 3) is not None
    assert compare(Hostile(), T([1])) is not None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (T([0.1234567, 2.0]), "tensor([0.123457, 2])"),
        (torch.zeros(9), "tensor of shape (9,)"),
        (torch.zeros(2, 2).int(), "tensor of shape (2, 2), int32"),
        (1 / 3, "0.333333"),
        (len, "the function len"),
        (int, "the class int"),
        (torch.nn.Linear(1, 1), "an object of class Linear"),
        (object(), "an object of class object"),
        ((i for i in ()), "<generator object <genexpr>>"),
    ],
)
def test_values_are_shown_short(value, text):
    assert show(value) == text


def test_long_values_are_cut_in_the_middle():
    text = show(list(range(1000)))
    assert len(text) <= 90
    assert text.startswith("[0, 1, 2")
    assert text.endswith("998, 999]")


def test_same_says_whether_two_values_are_equal_to_within_the_tolerance():
    assert same({"w": torch.ones(2)}, {"w": torch.ones(2) + 1e-7})
    assert not same({"w": torch.ones(2)}, {"w": torch.ones(3)})
    assert not same(None, torch.ones(2))
