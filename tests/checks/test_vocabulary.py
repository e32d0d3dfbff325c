"""course_exercises/authoring/vocabulary.py: the first sign that fits, and answers for each sentence."""

import re
from collections import Counter

import pytest
import torch

from course_exercises.authoring import Wrong, expect, expect_from_each, signs
from course_exercises.authoring.framework import COMMON
from course_exercises.authoring.vocabulary import MISTAKES, sentences, times, total
from course_exercises.checks import catalogue
from course_exercises.sources.chapters import ROOT
from tests.wrong_answers import answers_to, makers

NAMES = [mistake.name for mistake in MISTAKES]
# Those whose exercises have few sentences of their own, each with an answer.
CHAPTERS = "0", "2", "3", "7", "13"

OWN = [torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
SUM = sum(OWN)
MEAN = SUM / 3


def everywhere(value):
    return [value] * 3


# what came where the mean over three ranks was expected, and the mistake that has to be named
OF_MEANS = [
    (everywhere(SUM), "sum-not-mean"),
    (OWN, "unchanged"),
    ([own + MEAN for own in OWN], "added-to-own"),
    (everywhere(MEAN / 0), "not-finite"),
    ([own / 3 for own in OWN], "nothing-sent"),
    (everywhere(MEAN / 3), "divided-twice"),
    (everywhere(SUM / 2), "fixed-number"),
    (everywhere(OWN[0]), "rank-0s"),
    (everywhere(OWN[0] / 3), "rank-0s"),
    (everywhere(OWN[2]), "last-ranks"),
    (everywhere(MEAN.floor()), "rounded-down"),
    (everywhere(MEAN.mean()), "one-number"),
    (everywhere(MEAN.flatten()), "shape-lost"),
    (everywhere(MEAN.double()), "other-dtype"),
    (everywhere(MEAN.bfloat16().float()), "rounded"),
    ([OWN[0], MEAN, OWN[2]], "one-rank-only"),
    ([MEAN, MEAN, OWN[2]], "left-out"),
    (everywhere(torch.stack(OWN).amax(dim=0)), "another-reduction"),
    (everywhere(MEAN + 1), None),
    (everywhere(-MEAN), None),
    ([MEAN, MEAN], None),
    ("no values at all", None),
]


@pytest.mark.parametrize(("got", "name"), OF_MEANS, ids=[str(name) for _, name in OF_MEANS])
def test_the_first_sign_that_fits_is_named(got, name):
    with pytest.raises(Wrong) as caught:
        expect(got, everywhere(MEAN), likely=signs(OWN, everywhere(MEAN)))
    assert caught.value.misconception == name


def test_a_mean_in_place_of_a_sum():
    with pytest.raises(Wrong, match="mean-not-sum"):
        expect(everywhere(MEAN), everywhere(SUM), likely=signs(OWN, everywhere(SUM)))


def test_what_belongs_to_another_rank():
    shifted = [OWN[2], OWN[0], OWN[1]]
    with pytest.raises(Wrong, match="other-rank"):
        expect([OWN[1], OWN[2], OWN[0]], shifted, likely=signs(OWN, shifted))


def test_what_each_rank_has_in_whole_is_summed_again():
    whole = everywhere(MEAN + 1)
    with pytest.raises(Wrong, match="summed-again"):
        expect(everywhere(3 * MEAN + 3), whole, likely=signs(OWN, whole))


@pytest.mark.parametrize(("more", "name"), [(0, "kept-from-before"), (MEAN, "old-gradients")])
def test_what_the_call_before_gave(more, name):
    before = everywhere(MEAN + 1)
    with pytest.raises(Wrong, match=name):
        expect(
            everywhere(before[0] + more),
            everywhere(MEAN),
            likely=signs(OWN, everywhere(MEAN), before),
        )


def test_gradients_by_name_some_of_which_are_none():
    own = [{"weight": tensor, "frozen": None} for tensor in OWN]
    mean = everywhere(times(total(own), 1 / 3))
    assert mean[0]["frozen"] is None
    for got, name in (
        (everywhere({"weight": MEAN, "frozen": torch.zeros(2)}), "zeros-for-none"),
        (everywhere({"weight": None, "frozen": None}), "in-place"),
        ([{"weight": None, "frozen": None}, *mean[1:]], "no-gradient"),
        (everywhere(total(own)), "sum-not-mean"),
    ):
        with pytest.raises(Wrong, match=name):
            expect(got, mean, likely=signs(own, mean))


def test_each_rank_has_to_return_something_of_the_kind():
    expect_from_each(OWN)
    for got, name in (
        ([MEAN, None, None], "one-rank-returns"),
        ([1.0, 1.0, 1.0], "not-a-tensor"),
        ([None, None, None], "returns-nothing"),
    ):
        with pytest.raises(Wrong, match=name):
            expect_from_each(got)


def test_a_sentence_names_the_things_of_the_exercise():
    assert "Your gradients are" in sentences("gradients")["sum-not-mean"]
    assert not any("{" in sentence for sentence in sentences("rows").values())


def test_each_mistake_has_one_name_and_one_sentence():
    assert len(set(NAMES)) == len(NAMES) == len(set(sentences("values").values()))
    assert set(NAMES).isdisjoint(name for name, sentence in COMMON.items() if sentence)
    assert set(makers.MAKERS) <= {*NAMES, *COMMON}


def test_the_page_has_each_of_them():
    page = (ROOT / "docs" / "checks.md").read_text(encoding="utf-8")
    _, table = page.split("| what is seen | names |\n|---|---|\n")
    assert sorted(re.findall("`(.+?)`", table.partition("\n\n")[0])) == sorted(NAMES)


def test_each_mistake_is_met_by_an_answer():
    met = {each.names for id in catalogue.modules() for each in answers_to(id)}
    assert set(NAMES) <= met


@pytest.mark.parametrize("id", [id for id in catalogue.modules() if id.split(".")[0] in CHAPTERS])
def test_each_sentence_of_an_exercise_is_its_own_and_has_an_answer(id):
    exercise = catalogue.find(id)
    usual = {**COMMON, **sentences(exercise.things)}
    own = {n for n, said in exercise.misconceptions.items() if usual.get(n) != said}
    assert own.isdisjoint(usual), "the vocabulary has it"
    answers = Counter(each.names for each in answers_to(id) if each.names)
    shared = {"asked-for-gpus"}  # of several exercises, met in one of them
    assert own - shared <= set(answers)
