"""Predict, then measure: the table, and the predictions that are open in the learner's copies."""

import math

import nbformat
import predictions
import pytest
from copies import make_copy
from source import Cell

import notebooks
from course_utils.lesson.predictions import compare

LIKELY = {"One rank only.": {"bytes": 4}, "Of all ranks.": {"bytes": 32, "calls": 4}}


def table(capsys, predicted, measured, likely=None) -> list[str]:
    compare(predicted, measured, likely)
    return capsys.readouterr().out.splitlines()


def test_equal_and_wrong_rows(capsys):
    assert table(capsys, {"bytes": 8, "calls": 2}, {"bytes": 8, "calls": 3, "more": 1}) == [
        "          predicted      measured  equal",
        "bytes             8             8  True",
        "calls             2             3  False",
        "       measured: 1.5 times what was predicted",
    ]


def test_an_open_prediction_shows_what_was_measured(capsys):
    assert table(capsys, {"bytes": ..., "calls": 2}, {"bytes": 8, "calls": 2}, LIKELY)[1:] == [
        "bytes           ...             8  no prediction",
        "calls             2             2  True",
    ]


def test_the_measurement_of_another_prediction_is_none(capsys):
    assert table(capsys, {"bytes": 8, "calls": 2}, {"calls": 2, "GB": 1}) == [
        "Not measured: bytes. Run the cells between the prediction and this one."
    ]


def test_a_wrong_prediction_says_which_mistake_it_looks_like(capsys):
    rows = table(capsys, {"bytes": 32, "calls": 0}, {"bytes": 8, "calls": 2}, LIKELY)
    assert rows[2:] == [
        "       measured: 0.25 times what was predicted",
        "       Of all ranks.",
        "calls             0             2  False",  # nothing is a multiple of 0
    ]


def test_a_prediction_that_is_nearly_right_shows_the_difference(capsys):
    rows = table(capsys, {"bytes": 35521, "calls": 35519}, {"bytes": 35520, "calls": 35520})
    assert [row.strip() for row in (rows[2], rows[4])] == [
        "measured: 1 less than was predicted",
        "measured: 1 more than was predicted",
    ]


def test_a_prediction_is_rounded_as_what_was_measured_is(capsys):
    values = {"GB": 35.2321536, "kB": 645.9, "share": 3 / 7, "bytes": 3 * 0.1 * 10, "GiB": 8.51}
    measured = {"GB": 35.2, "kB": 646, "share": 0.43, "bytes": 3, "GiB": 10.0}
    rows = table(capsys, values, measured, {"Half of it.": {"GiB": 8.5}})
    assert [row.split()[-1] for row in rows[1:6]] == ["True"] * 4 + ["False"]
    assert rows[7].strip() == "Half of it."


@pytest.mark.parametrize(
    ("value", "got"),
    [(1.5, 2), (2.5, 2), (35, 35.2), (35.3, 35.2), (0.04, 0.0), (648, 646), (0.9, True)]
    + [(math.inf, math.nan), (1.0, math.inf), (math.nan, 1.0)],
)
def test_rounding_makes_no_other_prediction_right(capsys, value, got):
    assert table(capsys, {"a": value}, {"a": got})[1].endswith("False")


def test_what_is_no_number_has_no_ratio(capsys):
    rows = table(capsys, {"group": [0, 1]}, {"group": [0, 2]}, {"Neighbours.": {"group": [0, 1]}})
    assert rows[1:] == ["group        [0, 1]        [0, 2]  False", "       Neighbours."]


def test_a_long_sentence_hangs_below_its_first_line(capsys):
    sentence = "These are the bytes of one rank and of one step, " * 3
    rows = table(capsys, {"bytes": 4}, {"bytes": 8}, {sentence.strip(): {"bytes": 4}})
    assert len(rows) == 5 and max(map(len, rows)) <= 96
    assert rows[3].startswith("       These are") and rows[4].startswith("         ")
    assert " ".join(" ".join(rows[3:]).split()) == sentence.strip()


@pytest.mark.parametrize(
    ("source", "opened"),
    [
        (
            "n = 4\npredicted = {'a': n * 4, f'b {n}': [1, 2]}",
            "n = 4\npredicted = {'a': ..., f'b {n}': ...}",
        ),
        (
            "predicted_b = {\n    'é': (\n        1 + 2\n    ),  # bytes\n}",
            "predicted_b = {\n    'é': (\n        ...\n    ),  # bytes\n}",
        ),
        ("predicted = [{'a': 1}, {'a': {'b': 2}}]", "predicted = [{'a': ...}, {'a': ...}]"),
        (
            "predicted = {'a': 1}\nmeasured = {'a': 1}",
            "predicted = {'a': ...}\nmeasured = {'a': 1}",
        ),
    ],
)
def test_opened(source, opened):
    assert predictions.opened(source) == opened


@pytest.mark.parametrize(
    "chapter",
    [path.stem for path in notebooks.find_sources(notebooks.ROOT, []) if path.stem[0] == "0"],
)
def test_every_chapter_asks_and_its_learners_copy_has_no_answer(chapter):
    learners, solved = notebooks.copies_of(
        notebooks.ROOT, notebooks.ROOT / "solutions" / f"{chapter}.py"
    )
    asked = [i for i, cell in enumerate(learners.cells) if predictions.TAG in cell.tags]
    assert asked
    stored = nbformat.read(learners.path, as_version=4)
    for i in asked:
        values = predictions.predictions(stored.cells[i].source)
        assert values and all(getattr(value, "value", None) is ... for value in values)
    tables = [c for c in stored.cells if "no prediction" in str(c.get("outputs"))]
    assert tables
    # JupyterLab shows a folded output when the cell is run, and not before
    assert all(cell.metadata["jupyter"]["outputs_hidden"] for cell in tables)
    solved_text = solved.path.read_text(encoding="utf-8")
    assert "  no prediction" not in solved_text and "outputs_hidden" not in solved_text


def test_outputs_up_to_the_next_prose_are_folded_beside_a_prediction_and_after_a_question():
    cells = [
        Cell("markdown", "**Predict** it.", 1),
        Cell("code", "predicted = {'bytes': 8}", 2, tags=[predictions.TAG]),
        Cell("code", "print(measured)", 3),
        Cell("markdown", "Now measure.", 4),
        Cell("code", "print('in between')", 5),
        Cell("markdown", "And compare.", 6),
        Cell("code", "compare(predicted, measured)", 7),
        Cell("code", "plt.show()", 8),
        Cell("markdown", "What is wrong? Think before\nyou run the cell.", 9),
        Cell("code", "print('wrong')", 10),
        Cell("code", "print('all')", 11),
    ]
    learners = make_copy(cells, "", solved=False).cells
    folded = [i for i, cell in enumerate(learners, 1) if "jupyter" in cell.metadata]
    assert folded == [2, 3, 7, 8, 10, 11]
    assert [i for i in folded if learners[i - 1].metadata.jupyter.get("source_hidden")] == [7]
    assert all(
        cell.metadata.jupyter.outputs_hidden for cell in learners if cell.metadata.get("jupyter")
    )
    assert not any("jupyter" in cell.metadata for cell in make_copy(cells, "", solved=True).cells)
