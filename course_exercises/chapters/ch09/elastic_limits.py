"""Exercise 9.5, `elastic_limits`: what it asks for, and how it is checked."""

from collections.abc import Callable
from typing import Any

from course_exercises.authoring import Exercise, expect, expect_type

limits = Exercise(
    "9.5",
    "elastic_limits",
    points=1,
    minutes=10,
    kind="first",
    parameters=("available", "fits", "useful", "losses", "joins", "new_code"),
    hints=[
        "When can the run not go on? When has one more node nothing to do?",
        (
            "Which events use up a restart? torchrun's agent counts failures of workers; when nodes "
            "wait to come in, it restarts them without counting."
        ),
        (
            "The minimum is what the model needs, the maximum the smaller of what you may get and "
            "what has work, the restarts the expected losses. For new code minimum and maximum are "
            "both what the model needs, and there is no restart."
        ),
    ],
    misconceptions={
        "minimum-too-low": "The run would start on fewer nodes than hold the model, and run out of "
        "memory.",
        "minimum-too-high": "The run stops as soon as a node is lost, though those that are left "
        "hold the model.",
        "maximum-without-work": "The run would take in nodes for which there is no work: the global "
        "batch has no sample for their ranks.",
        "maximum-not-there": "The maximum is above `available`: nobody gives the run these nodes, and who reads the command plans "
        "with them.",
        "maximum-too-low": "The run leaves nodes unused that it may have, and that have work.",
        "joins-counted": "Joins are counted as restarts. torchrun restarts the workers for them "
        "without counting.",
        "joins-subtracted": "Nodes that join make up for no restart: each loss costs one, whoever comes "
        "later.",
        "no-restarts": "Without restarts the first loss ends the run.",
        "one-restart-more": "One restart too many: the first start is none, so that as many losses need as "
        "many restarts.",
        "restarts-fixed": "The number of restarts does not follow from the losses.",
        "new-code-restarts": "New code fails because of a bug. A restart repeats it, and hides where "
        "it came from.",
        "new-code-large": "New code runs on more nodes than hold the model: more logs to read, and "
        "no more to learn.",
    },
)


def _check_limits(answer, available: int, fits: int, useful: int, losses: int, joins: int) -> None:
    got = answer(available, fits, useful, losses, joins, False)
    expect_type(got, (tuple, list))
    maximum = min(available, useful)

    def differs(index: int, fits_mistake: Callable[[int], bool]) -> Callable[[Any], bool]:
        return lambda got: fits_mistake(got[index])

    mistakes = {
        "minimum-too-low": differs(0, lambda minimum: minimum < fits),
        "minimum-too-high": differs(0, lambda minimum: minimum > fits),
        "maximum-without-work": differs(1, lambda most: most > useful),
        "maximum-not-there": differs(1, lambda most: most > available),
        "maximum-too-low": differs(1, lambda most: most < maximum),
        "joins-counted": differs(2, lambda restarts: joins and restarts == losses + joins),
        "joins-subtracted": differs(2, lambda n: joins and 0 < n == losses - joins),
        "no-restarts": differs(2, lambda restarts: restarts == 0),
        "one-restart-more": differs(2, lambda restarts: restarts == losses + 1),
        "restarts-fixed": True,
    }
    expected = (fits, maximum, losses)
    given = f"available {available}, fits {fits}, useful {useful}, losses {losses}, joins {joins}"
    what = f"minimum, maximum, restarts for {given}"
    expect(tuple(got), expected, what=what, likely=mistakes)


@limits.requires("sharded over everything that you have")
def sharded_over_everything_that_you_have(answer, draw):
    nodes, losses = draw.integer(10, 20), draw.integer(5, 9)
    _check_limits(answer, nodes, nodes, 4 * nodes, losses, losses - 1)


@limits.requires("spare nodes beside those that have work")
def spare_nodes_beside_those_that_have_work(answer, draw):
    fits = draw.integer(2, 4)
    useful = fits + draw.integer(2, 4)
    for losses in (draw.integer(5, 9), 1, 0):
        joins = draw.integer(1, 3)
        _check_limits(answer, useful + draw.integer(1, 3), fits, useful, losses, joins)


@limits.requires("nodes that come and go")
def nodes_that_come_and_go(answer, draw):
    fits = draw.integer(2, 4)
    available = fits + draw.integer(20, 40)
    losses = draw.integer(100, 200)
    _check_limits(answer, available, fits, 2 * available, losses, losses - draw.integer(2, 9))


@limits.requires("new code")
def new_code(answer, draw):
    fits = draw.integer(2, 4)
    available, useful = fits + draw.integer(5, 9), fits + draw.integer(5, 9)
    got = answer(available, fits, useful, draw.integer(5, 9), draw.integer(5, 9), True)
    expect_type(got, (tuple, list))
    mistakes = {
        "minimum-too-low": lambda got: got[0] < fits,
        "new-code-large": lambda got: got[1] > fits,
        "new-code-restarts": lambda got: got[2] > 0,
    }
    expect(tuple(got), (fits, fits, 0), what="minimum, maximum, restarts", likely=mistakes)
