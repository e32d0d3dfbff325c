"""Stage 13.4 of the learner's script: within a budget of memory that copies break, also when half of the ranks are gone."""

from course_exercises.authoring import Wrong, expect, same
from course_exercises.authoring.scripts import Life, Ran, Script, Stage, trains_as_before

stage = Stage(
    "13.4",
    minutes=50,
    hints=[
        (
            "Ask of each moment what a rank holds: while the model is made, in a step, when a start goes on from a "
            "checkpoint, at the end. On two ranks, shards of parameters, gradients and momentum are 1.5 P. What may be "
            "there beside them?"
        ),
        (
            "`torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)` keeps the input of a block and computes the "
            "rest again. `inputs.split(options.micro_batch)` cuts a share: each part's loss counts as its windows in "
            "the share. At the end, all ranks write their shards, and nobody gathers."
        ),
        (
            "Every forward pass gathers, so all ranks have to make as many, also with the windows that are held out: "
            "`DistributedSampler(held_out, data_ranks, rank, shuffle=False)` repeats windows until they do. Those that are "
            "repeated do not count in the mean."
        ),
    ],
    misconceptions={
        "no-gradient-found": "No step of the optimizer has found a gradient. Each needs a `backward` before it, on the "
        "parameters that the optimizer has: make it after `fully_shard`. What `set_requires_gradient_sync(False)` holds "
        "back has to be let go in the last micro-batch.",
        "not-sharded": "The ranks hold more than their share of the parameters between two steps. `fully_shard` comes for "
        "each block and for the model, and the optimizer after it.",
        "whole-at-first": "A rank had memory for a whole matrix while the model was made. Build it under "
        "`torch.device('meta')`, and give each rank its part of the first values.",
        "one-unit": "`fully_shard` was called for the model alone: all of it is gathered before the first block computes.",
        "whole-share": "A rank computes its whole share of the batch at once. When half of the ranks are gone a share is "
        "twice as large, and so is what it keeps for backward. Cut it into parts of at most `--micro-batch` windows.",
        "activations-kept": "What the blocks compute stays until backward. Let each keep its input only, and compute the "
        "rest again (`torch.utils.checkpoint`).",
        "whole-gradients": "With `set_requires_gradient_sync(False)` the gradients of all blocks stay whole until the last "
        "micro-batch. Reduce them in each: that sends more, and holds a share.",
        "whole-at-resume": "When it goes on from a checkpoint, a rank holds too much. Load into shards: `dcp.load` reads "
        "what a rank needs.",
        "whole-at-the-end": "After the last step a rank holds too much: the whole model, for instance, which is gathered to "
        "be saved. All ranks write their shards with `dcp.save`, or rank 0 writes one parameter after the other.",
        "too-much": "A rank holds more than the budget in a step, though its parameters are shards, blocks compute "
        "again and micro-batches are small. Is something kept from one micro-batch to the next, or gathered too early?",
        "summed-micro-batches": "The gradient is too large by the number of micro-batches: `backward` adds up. Each part "
        "counts as many windows as it has, out of the share's.",
        "uneven-micro-batches": "It is right where the micro-batches of a share have the same size. Where the last one is "
        "smaller it counts too much: weigh each by its windows.",
        "other-steps": "The parameters are not those of one rank. A step is made of all micro-batches of all ranks, and "
        "gradients are cleared once in it.",
        "own-loss": "The loss in the log is not the mean of all windows of an epoch. It is the sum over the micro-batches, "
        "weighed as their gradients are, and the mean over the ranks.",
        "held-out": "The held-out loss is not that of one rank. Each held-out window counts once, also where some ranks "
        "have one more than others.",
        "starts-over": "When half of the ranks were killed, the others did not go on from the newest checkpoint.",
    },
    failures={"timeout": "not-every-rank", "lost": "not-every-rank"},
)
BUDGET = 2.0  # times the bytes of the parameters
# A model of which a block is small, and windows of which a few are large beside it.
SIZES = {"width": 32, "layers": 12, "batch": 28, "epochs": 2, "micro-batch": 2}
ALONE = SIZES | {"micro-batch": 28}  # one rank has no budget: it takes a step's windows at once
LIVES = Life(4, after=2), Life(2, metered=True)
SAVED = SIZES | {"save-every": 1}


def within(ran: Ran, script: Script, draw, resumed: bool = False) -> None:
    """Raises Wrong where a rank holds more than the budget, or had a whole matrix."""
    whole = _numbers(script.on(1, draw, **ALONE))
    for rank in ran.ranks:
        held = {phase: peak / 4 / whole for phase, peak in rank.peaks.items()}
        phase, most = max(held.items(), key=lambda item: item[1])
        if most > BUDGET:
            signs = {
                "not-sharded": _not_sharded(ran, whole),
                "one-unit": rank.shardings == 1,
                "whole-at-resume": phase == "start" and resumed,
                "whole-at-first": phase == "start",
                "whole-at-the-end": phase == "end",
                "whole-share": rank.computed > SIZES["micro-batch"],
                "activations-kept": not rank.recomputes,
                "whole-gradients": rank.unsynced > 0,
                "too-much": True,
            }
            name = next(name for name, seen in signs.items() if seen)
            where = {"start": "before the first step", "end": "after the last step"}
            got = f"{most:.2f} P {where.get(phase, 'in a step')}"
            raise Wrong(name, expected=f"at most {BUDGET} P on each of {len(ran.ranks)}", got=got)
        if rank.largest > SIZES["width"] ** 2:  # half of a block's largest matrix
            got = f"a parameter of {rank.largest} numbers"
            raise Wrong("whole-at-first", expected="parts alone", got=got)


def _numbers(ran: Ran) -> int:
    """In all parameters."""
    return sum(value.numel() for value in ran.model.values())


def _not_sharded(ran: Ran, whole: int) -> bool:
    """Whether a rank's optimizer has much more than its share of `whole` numbers."""
    kept = sum(part.numel() for part in ran.ranks[0].parameters)
    return kept > 1.2 * whole / len(ran.ranks)


@stage.requires("one rank trains as before", seconds=60)
def one_rank_trains_as_before(script, draw):
    trains_as_before(script, draw)
    if not script.on(1, draw).ranks[0].gradient.numel():
        raise Wrong("no-gradient-found", expected="gradients in a step", got="none")


@stage.requires(
    "micro-batches of one size: the parameters of one rank", seconds=60, needs_earlier=True
)
def micro_batches_of_one_size(script, draw):
    alone = script.on(1, draw, **{"micro-batch": 8})
    for ranks, size in ((1, 2), (2, 2), (4, 1)):
        ran = script.on(ranks, draw, **{"micro-batch": size})

        def summed(_, ran=ran, parts=8 // ranks // size) -> bool:
            whole = script.on(len(ran.ranks), draw, **{"micro-batch": 8}).ranks
            pairs = zip(ran.ranks, whole, strict=True)
            return all(same(one.gradient, parts * other.gradient) for one, other in pairs)

        signs = {
            "not-sharded": _not_sharded(ran, _numbers(alone)),
            "summed-micro-batches": summed,
            "other-steps": True,
        }
        expect(ran.model, alone.model, likely=signs)


@stage.requires("micro-batches of different sizes too", seconds=60, needs_earlier=True)
def micro_batches_of_different_sizes(script, draw):
    alone = script.on(1, draw, **{"micro-batch": 8})
    for ranks, size in ((1, 5), (2, 3)):
        ran = script.on(ranks, draw, **{"micro-batch": size})
        expect(ran.model, alone.model, likely={"uneven-micro-batches": True})


@stage.requires("the log is that of one rank", seconds=60, needs_earlier=True)
def the_log_is_that_of_one_rank(script, draw):
    alone = script.on(1, draw, **{"micro-batch": 8}).log
    log = script.on(2, draw, **{"micro-batch": 3}).log
    for of, name in (("loss", "own-loss"), ("held_out_loss", "held-out")):
        got, expected = [line[of] for line in log], [line[of] for line in alone]
        expect(got, expected, what=of, each="epoch", likely={name: True})


@stage.requires(
    "on four ranks it keeps the budget, from its start to its end", seconds=60, needs_earlier=True
)
def on_four_ranks(script, draw):
    [ran] = script.lives(draw, Life(4, metered=True), **SIZES | {"epochs": 1})
    within(ran, script, draw)


@stage.requires(
    "half of the ranks die, and the others go on within the budget", seconds=60, needs_earlier=True
)
def half_of_the_ranks_die(script, draw):
    _, ran = script.lives(draw, *LIVES, **SAVED)
    alone = script.on(1, draw, **ALONE)
    took = len(script.steps(ran)), len(script.steps(alone)) - 1
    if took[0] > took[1]:
        raise Wrong("starts-over", expected=f"at most {took[1]} steps", got=took[0])
    within(ran, script, draw, resumed=True)
    expect(ran.model, alone.model, likely={"other-steps": True})
