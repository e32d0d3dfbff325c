"""Exercise 9.5, `elastic_limits`: what it asks for, and how it is checked."""

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
        "new-code": "New code runs on as few nodes as hold the model, and is not restarted: it fails because of a "
        "bug, which a restart repeats, and each node more is one more log to read.",
        "minimum": "With a lower minimum than `fits` the run would start on nodes that do not hold the model. With a "
        "higher one it would stop as soon as a node is lost, though those that are left hold it.",
        "maximum": "The maximum is the smaller of `available` and `useful`. A node beyond `useful` has no sample to "
        "work on, one beyond `available` nobody gives you, and with fewer the run leaves nodes unused that have work.",
        "joins": "Nodes that join neither cost a restart nor save one: torchrun restarts the workers for them "
        "without counting, and each loss costs one, whoever comes later.",
        "restarts": "As many restarts as losses: without one left, a loss ends the run, and the first start is none.",
    },
)


def _check_limits(answer, available, fits, useful, losses, joins, new_code=False) -> None:
    got = answer(available, fits, useful, losses, joins, new_code)
    expect_type(got, (tuple, list))
    expected = (fits, fits, 0) if new_code else (fits, min(available, useful), losses)
    mistakes = {
        "minimum": lambda got: got[0] < fits or (got[0] > fits and not new_code),
        "new-code": lambda got: new_code and len(got) == 3,
        "maximum": lambda got: got[1] != expected[1],
        "joins": lambda got: joins and got[2] in (losses + joins, max(0, losses - joins)),
        "restarts": lambda got: len(got) == 3,
    }
    given = f"available {available}, fits {fits}, useful {useful}, losses {losses}, joins {joins}"
    what = f"minimum, maximum, restarts for {'new code, ' if new_code else ''}{given}"
    expect(tuple(got), expected, what=what, likely=mistakes)


@limits.requires("sharded over everything that you have")
def sharded_over_everything_that_you_have(answer, draw):
    # losses without the joins are no number that somebody would always return
    nodes, losses, more = draw.integer(10, 20), draw.integer(9, 14), draw.choice((4, 6, 7))
    _check_limits(answer, nodes, nodes, 4 * nodes, losses, losses - more)


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
    available, useful, *events = (draw.integer(5, 9) for _ in range(4))
    _check_limits(answer, fits + available, fits, fits + useful, *events, new_code=True)
