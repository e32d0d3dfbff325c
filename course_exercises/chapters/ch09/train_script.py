"""Stage 9.6 of the learner's script: killed, told to leave and moved, it trains as if nothing had happened."""

import signal

from course_exercises.authoring import Wrong, expect
from course_exercises.authoring.scripts import Life, Stage, trains_as_before
from course_utils.launch import RankFailure

stage = Stage(
    "9.6",
    minutes=45,
    hints=[
        (
            "What does the next step depend on? Parameters, the optimizer's state, and the place in the data: the epoch, "
            "the steps in it, and for the log the sum of their losses. All of it belongs into one checkpoint, and is put "
            "back before the first step."
        ),
        (
            "`get_state_dict(model, optimizer)` and `dcp.save` write parts that any number of ranks can load. Save to a "
            "folder that no start looks at, and let rank 0 rename it when all have written."
        ),
        (
            "A handler of SIGTERM only notes that it was called. After each step, the ranks add up who was told: if the "
            "sum is not zero, all of them save and leave `main`. To go on inside an epoch, call `set_epoch` and leave "
            "out the first `steps * share` windows of the rank's sampler."
        ),
    ],
    misconceptions={
        "starts-over": "Started again, it begins at the first step. Look for the newest checkpoint in the folder of "
        "`--out` before you train.",
        "seldom-saved": "It goes on from a step that is too long ago. `--save-every 3` asks for a checkpoint after every "
        "third step, counted over all epochs.",
        "position-lost": "Started again, it goes on at the beginning of an epoch, so that some windows are used twice or "
        "not at all. Save the steps in the epoch, and leave out as many batches.",
        "other-order": "Started again, it reads windows that no step of an uninterrupted run has together. The order has "
        "to follow from the seed and the epoch (`set_epoch`) on any number of ranks.",
        "optimizer-lost": "Started again, the optimizer has forgotten its momentum. Save and load its state too.",
        "other-steps": "The windows of each step are right, and the parameters at the end are not those of a run that "
        "nobody has interrupted. Is a step left out? Is all that the next step depends on loaded, into what trains?",
        "rank-bound": "What four ranks have saved cannot be loaded by two, or the other way round. "
        "`torch.distributed.checkpoint` loads each rank's part from whichever files have it.",
        "died-of-sigterm": "SIGTERM has ended a rank at once. `signal.signal(signal.SIGTERM, handler)` lets it finish its "
        "step and save.",
        "trained-on": "After SIGTERM it has trained to the end. A machine that asks so is gone half a minute later: save "
        "after the step, and leave.",
        "left-alone": "After SIGTERM the ranks do not do the same: one leaves or saves, and another goes on. The signal "
        "reaches them at different moments. Let them add up after each step who was told, and leave together.",
        "left-unsaved": "After SIGTERM it has left without a checkpoint of that step.",
        "not-whole": "A save that was killed halfway is what the next start looks at. Give a checkpoint its name when all "
        "of it is written.",
        "log-lost": "After the second start the log has not one line for each epoch. Keep the lines of the epochs that are "
        "done, and add to them; write each line through to the disk (`flush`).",
        "part-of-an-epoch": "The loss of the epoch that was interrupted is not its mean over all steps. Save the sum so far.",
    },
)
EVERY = 3  # steps between two checkpoints


def went_on(script, draw, before: Life, ranks: int, **options: int):
    """The life that follows another, and the step at which it begins."""
    expected = script.steps(script.on(1, draw))
    cut, ran = script.lives(draw, before, Life(ranks), **options)
    steps = script.steps(ran)
    if steps and steps[0] not in expected:
        raise Wrong("other-order", expected="the windows of a step", got="others")
    return cut, ran, expected.index(steps[0]) if steps else len(expected)


def same_end(script, ran, draw) -> None:
    """What it has read and its parameters are those of one rank that nobody has interrupted."""
    alone = script.on(1, draw)
    steps, expected = script.steps(ran), script.steps(alone)
    expect(
        steps,
        expected[len(expected) - len(steps) :],
        what="the windows by step",
        likely={"position-lost": True},
    )
    if any(rank.fresh for rank in ran.ranks):
        raise Wrong(
            "optimizer-lost", expected="the optimizer's state of the step before", got="none"
        )
    expect(ran.model, alone.model, likely={"other-steps": True})


stage.requires("one rank trains as before", seconds=60)(trains_as_before)


@stage.requires("killed after a step, it goes on from its newest checkpoint", seconds=60)
def killed_it_goes_on(script, draw):
    life = Life(2, after=8)
    _, ran, first = went_on(script, draw, life, 2, **{"save-every": EVERY})
    if first not in (6, 7, 8):
        name = "starts-over" if first == 0 else "seldom-saved" if first < 5 else "position-lost"
        raise Wrong(name, expected="a start that goes on at step 6", got=f"at step {first}")
    same_end(script, ran, draw)


@stage.requires("its log is that of a run that nobody has interrupted", seconds=60)
def its_log_is_that_of_one_run(script, draw):
    _, ran, _ = went_on(script, draw, Life(2, after=8), 2, **{"save-every": EVERY})
    alone = script.on(1, draw).log
    epochs = [line["epoch"] for line in ran.log]
    expect(
        epochs,
        [line["epoch"] for line in alone],
        what="the epochs in the log",
        likely={"log-lost": True},
    )
    losses = [line["loss"] for line in ran.log]
    expected = [line["loss"] for line in alone]
    expect(losses, expected, what="loss", each="epoch", likely={"part-of-an-epoch": True})


@stage.requires("fewer ranks go on, and more", seconds=60, needs_earlier=True)
def other_numbers_of_ranks_go_on(script, draw):
    lives = Life(4, after=4), Life(2, after=4), Life(4)
    try:
        *_, ran = script.lives(draw, *lives, **{"save-every": EVERY})
    except RankFailure as failure:
        if failure.kind != "exception":
            raise
        raise Wrong("rank-bound", expected="a start with 2 ranks", got=str(failure)) from failure
    same_end(script, ran, draw)


@stage.requires(
    "told by SIGTERM to leave, it finishes the step, saves and leaves",
    seconds=60,
    needs_earlier=True,
    failures=dict.fromkeys(("timeout", "mismatch"), "left-alone"),
)
def told_to_leave_it_saves(script, draw):
    told = Life(2, after=4, signal=signal.SIGTERM)
    cut, ran, first = went_on(script, draw, told, 2, **{"save-every": 100})
    if cut is None:
        raise Wrong(
            "died-of-sigterm", expected="a script that leaves by itself", got="a rank that has died"
        )
    took = len(script.steps(cut))
    if took > 6:
        raise Wrong("trained-on", expected="4 or 5 steps", got=took)
    if first != took:
        raise Wrong(
            "left-unsaved",
            expected=f"a start that goes on after {took} steps",
            got=f"one after {first}",
        )
    same_end(script, ran, draw)


@stage.requires(
    "killed while it saves, it goes on from the checkpoint before", seconds=60, needs_earlier=True
)
def killed_while_it_saves(script, draw):
    if not hasattr(signal, "SIGXFSZ"):  # Windows cannot kill at a byte
        return
    torn = Life(2, after=4, signal=signal.SIGXFSZ)
    try:
        _, ran, first = went_on(script, draw, torn, 2, **{"save-every": EVERY})
    except RankFailure as failure:
        raise Wrong("not-whole", expected="a second start", got=str(failure)) from failure
    expect(first, EVERY, what="the step at which it goes on", likely={"not-whole": True})
    same_end(script, ran, draw)
