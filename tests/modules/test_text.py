import pytest
import torch

from course_utils.lesson.text import encode, text, vocabulary, windows


def test_the_story_is_plain_and_long_enough_to_learn_from():
    assert 30_000 < len(text()) < 40_000
    assert text().isascii()
    assert text().startswith("THE LONG SHED\n")
    paragraphs = text().split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs), "no paragraph comes twice"


def test_the_vocabulary_divides_among_2_3_4_6_and_8_ranks():
    assert len(vocabulary()) == 72
    assert vocabulary() == sorted(vocabulary())


def test_encoding_can_be_read_back():
    tokens = encode(text())
    assert tokens.dtype == torch.int64 and tokens.shape == (len(text()),)
    assert "".join(vocabulary()[token] for token in tokens) == text()
    assert encode("").shape == (0,)


def test_a_foreign_character_is_named():
    with pytest.raises(ValueError, match="no '%'"):
        encode("50 % of a lamp")


def test_windows_are_places_of_the_story_and_what_follows():
    inputs, targets = windows(context=16, count=50, seed=3)
    assert inputs.shape == targets.shape == (50, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for some, others in zip(inputs, targets, strict=True):
        place = "".join(vocabulary()[token] for token in [*some, others[-1]])
        assert place in text()


def test_windows_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first, _ = windows(8, 20, seed=5)
    torch.manual_seed(2)
    again, _ = windows(8, 20, seed=5)
    other, _ = windows(8, 20, seed=6)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_longest_window_is_the_story():
    length = len(text())
    inputs, targets = windows(length - 1, 2)
    assert torch.equal(inputs[1], encode(text())[:-1])
    assert torch.equal(targets[1], encode(text())[1:])
    for context in (0, length):
        with pytest.raises(ValueError, match=f"context is {context}"):
            windows(context, 1)
