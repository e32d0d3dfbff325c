"""What launch says of each program of the corpus, and under NCCL's rules where that differs: of all, the
table of `python -m tests.reports` tells it."""

import pytest

from tests.reports import REPORTS
from tests.reports.corpus import PASSES, Report
from tests.support.needing_rules import needs_rules


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "each" in metafunc.fixturenames:
        mine = [each for each in REPORTS if each.theme == metafunc.cls.theme]
        cases = [case(each, None) for each in mine]
        cases += [case(each, "nccl") for each in mine if each.says["nccl"] != each.says[None]]
        metafunc.parametrize(("each", "rules"), cases)


def case(each: Report, rules: str | None):
    """A program that is known not to be explained yet fails when it begins to be."""
    known = each.known[rules]
    marks = [pytest.mark.xfail(reason=known, strict=True)] * bool(known) + [needs_rules] * bool(
        rules
    )
    return pytest.param(each, rules, id=f"{each.program.__name__}-{rules or 'plain'}", marks=marks)


class OfATheme:
    def test_the_message_says_what_it_has_to(self, each, rules):
        wrong, _, said = each.tried(rules)
        assert not wrong, f"{wrong}:\n{said}"


# a class for each theme, since pytest's workers share the tests out by classes


class TestHangs(OfATheme):
    theme = "hangs"


class TestMismatches(OfATheme):
    theme = "mismatches"


class TestRank0(OfATheme):
    theme = "rank0"


class TestCheckpoints(OfATheme):
    theme = "checkpoints"


class TestUneven(OfATheme):
    theme = "uneven"


class TestGroups(OfATheme):
    theme = "groups"


class TestThreads(OfATheme):
    theme = "threads"


class TestLoaders(OfATheme):
    theme = "loaders"


class TestMessages(OfATheme):
    theme = "messages"


def test_every_theme_has_its_class():
    classes = {each.theme for each in OfATheme.__subclasses__()}
    assert classes == {each.theme for each in REPORTS}


def test_the_corpus_is_broad():
    assert len({str(each) for each in REPORTS}) == len(REPORTS) >= 100
    assert len({source for each in REPORTS for source in each.sources}) >= len(REPORTS)
    assert sum(each.says[None] is PASSES for each in REPORTS) >= 15


def test_nearly_all_are_named_right():
    for rules in (None, "nccl"):
        known = [each for each in REPORTS if each.known[rules]]
        assert len(known) <= 0.05 * len(REPORTS), known


def program(rank):
    barrier()  # <- here


def barrier():
    pass


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("rank 1 waits in barrier, line {line}: barrier()", ""),
        ("rank 1 waits in barrier, line {line}:\n   barrier()", ""),
        ("ranks 0, 1 and 3 wait in barrier, line {line}: barrier()", ""),
        ("rank 1 waits, line {line}: barrier()  (rank 0 ended)", ""),
        ("rank 1 waits in gather, line {line}: gather()", "lacks line {line}"),
        ("rank 0 waits in barrier, line {line}: barrier()", "lacks rank 1"),
        ("rank 1 waits in barrier, line 9999: barrier()", "lacks line {line}"),
        ("Rank 1, line {line}: barrier(); ProcessGroupGloo", "says ProcessGroupGloo"),
        (None, "passes"),
    ],
)
def test_a_message_that_lacks_something_is_wrong(said, wrong):
    line = program.__code__.co_firstlineno + 1
    report = Report(program, ("a/b#1",), 2, {"nccl": ("rank 1",)}, {"nccl": ""})
    assert report.wrong(said and said.format(line=line), "nccl") == wrong.format(line=line)


def test_a_right_program_may_not_be_refused():
    report = Report(program, ("a/b#1",), 2, {None: PASSES}, {None: ""})
    assert report.wrong(None, None) == ""
    assert report.wrong("the ranks' calls do not match", None) == "is refused"
