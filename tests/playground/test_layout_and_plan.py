"""The layout page and the plan page, against the planner and what ranks send."""

import json
import subprocess
import sys

import pytest

from course_planner.networks import place_of
from playground import layout, plan


@pytest.mark.parametrize("board", layout.BOARDS)
def test_a_group_crosses_where_the_planner_lets_it_leave_its_node(board):
    for link in layout.positions(board):
        shown, (where, split) = json.loads(layout.view(link)), layout.read(link)
        for group in shown["groups"]:
            far = group["ranks"] > 1 and place_of(group["name"], split, where.node).nodes > 1
            assert group["crosses"] == far, (link, group)


@pytest.mark.parametrize("board", layout.BOARDS)
def test_no_position_that_fits_is_below_par(board):
    shown = {link: json.loads(layout.view(link)) for link in layout.positions(board)}
    seconds = {link: each["seconds"] for link, each in shown.items() if each["fits"]}
    assert {each["par"] for each in shown.values()} == {min(seconds.values())}
    assert {each["best"] for each in shown.values()} <= seconds.keys()
    start = next(each for each in shown.values())
    assert len(start["places"]) == start["machines"] * start["node"]


@pytest.mark.parametrize("link", ["2x4/dp2.pp2.tp2", "2x8/dp1.pp4.tp4", "2x4/tp1.dp2.pp4"])
def test_real_ranks_send_across_what_the_page_says(link, capsys):
    exec(layout.cell(link), {"__name__": "__main__"})  # noqa: S102 - what a learner pastes
    told = float(capsys.readouterr().out.split()[1])
    assert told == pytest.approx(layout.crossing(link), rel=0.01)


def test_what_a_layout_is_mistaken_for():
    link = "2x8/dp2.pp2.tp4"
    told = {guess["value"]: guess["said"] for guess in json.loads(layout.guesses(link))}
    assert told[round(layout.crossing(link), 2)] == "That is right."
    assert "share it out" in told[round(layout.crossing(link) / 2, 2)]
    assert "its data group cross" in told[2.12]
    assert "nothing cross" in told[0]


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("2x8/tp4.dp2.pp4", "4 x 2 x 4 ranks are not 16."),
        ("2x8/tp16.dp1.tp1", "no position"),
        ("9x9/tp1.dp1.pp1", "no position"),
        ("2x4/tp1.dp1.pp8", None),
    ],
)
def test_a_position_that_cannot_be_says_why(link, why):
    assert (why or "None") in str(json.loads(layout.view(link)).get("why"))


def test_a_plan_is_that_of_the_command():
    link = "8xH100/tp2.pp2.z1.b2.full"
    shown, command = json.loads(plan.view(link)), plan.cell(link).replace("\\\n", " ").split()[1:]
    done = subprocess.run(
        [sys.executable, *command[1:]], capture_output=True, text=True, check=True
    )
    assert f"together {shown['total']:.3g} GiB" in done.stdout
    assert f"together {shown['seconds']:.3g} (" in done.stdout


@pytest.mark.parametrize("board", plan.BOARDS)
def test_the_planner_is_never_slower_than_what_one_may_choose(board):
    best = json.loads(plan.best(board))["seconds"]
    tried = 0
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8):
            for zero, again in ((0, "selective"), (1, "half"), (2, "full"), (3, "selective")):
                shown = json.loads(plan.view(f"{board}/tp{tp}.pp{pp}.z{zero}.b1.{again}"))
                allowed = "why" not in shown and shown["fits"] and (pp == 1 or zero in (1, 3))
                tried += allowed
                assert not allowed or shown["seconds"] >= best * 0.999
    assert tried


KNOWN = (
    "Activations come",
    "temporary tensors alone",
    "right",
    "ZeRO shards it",
    "all ranks together",
)


def test_what_a_plan_is_mistaken_for():
    link = "8xH100/tp1.pp1.z3.b1.selective"
    told = {guess["value"]: guess["said"] for guess in json.loads(plan.guesses(link))}
    said = [word for sentence in told.values() for word in KNOWN if word in sentence]
    assert said == list(KNOWN)


def test_each_limit_that_a_board_has_can_be_chosen():
    for board, start in (
        ("8xH100", "tp1.pp1.z3.b1"),
        ("64xH100", "tp8.pp1.z1.b1"),
        ("8x4090", "tp8.pp1.z1.b1"),
    ):
        assert json.loads(plan.view(f"{board}/{start}.selective"))["limit"] in plan.LIMITS
