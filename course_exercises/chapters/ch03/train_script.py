"""Stage 3.6 of the learner's script: DistributedDataParallel, started by torchrun."""

import math

from course_exercises.authoring import Wrong, expect, same
from course_exercises.authoring.scripts import BATCH, EPOCHS, Stage, trains_as_before

stage = Stage(
    "3.6",
    minutes=40,
    hints=[
        (
            "Go through the loop and ask of each line: on which rank, on which device, for which windows? Change the "
            "data first, then the model, then what is logged and saved."
        ),
        (
            "A `DistributedSampler` deals the windows out, and its `set_epoch` shuffles them anew. A rank's batch is "
            "`options.batch` divided by the world size. The forward pass goes through `DistributedDataParallel`."
        ),
        (
            "For the log, add up on each rank what the mean is made of, all-reduce the sums, and divide afterwards. The "
            "held-out windows are dealt out without repeats: every n-th one, from the rank's own number on."
        ),
    ],
    misconceptions={
        "sampler-and-shuffle": "A `DataLoader` takes `shuffle=True` or a sampler. The sampler shuffles: leave "
        "`shuffle` out.",
        "no-sampler": "Every rank reads all windows. Deal them out with a `DistributedSampler`.",
        "whole-batch": "Each rank takes as many windows in a step as one process did, so that the batch grows with the "
        "ranks. `--batch` is the batch of all ranks together: divide it by the world size.",
        "last-batch": "The last batch of an epoch is smaller than the others. Keep `drop_last=True`, so that every step has "
        "a whole batch.",
        "same-order": "The second epoch has the order of the first. Call `sampler.set_epoch(epoch)` before each.",
        "not-wrapped": "The ranks' parameters drift apart. `DistributedDataParallel` averages the gradients where the "
        "forward pass goes through it: wrap the model, and compute the loss with the wrapper, not with the bare model.",
        "other-steps": "The ranks agree, and their parameters are not those of one process. Look for a sum of gradients "
        "where the mean is due, for another batch of all ranks together, for what divides or multiplies the loss, and for "
        "first parameters that are drawn without `--seed`.",
        "summed-loss": "The loss in the log is the sum over the ranks. Divide it by the world size.",
        "own-loss": "The loss in the log is not the mean over all ranks. `loss.item()` is that of a rank's own windows: "
        "add up over the ranks, then divide.",
        "held-out-repeated": "Some held-out windows count twice. A `DistributedSampler` repeats windows until all ranks "
        "have as many: give rank r every n-th window from r on.",
        "held-out-left-out": "Some held-out windows are evaluated by no rank, or their losses stay on the rank that has "
        "them. All of them count.",
        "mean-of-means": "Each held-out window is read once, and the mean over them is not right. Ranks have different "
        "numbers of windows: add up the losses and the windows over the ranks, and divide then.",
        "all-save": "More than one rank saves the model to the same file, and so they write over each other. Let rank 0 "
        "save.",
        "all-log": "More than one rank opens `log.jsonl` to write, and so they write over each other. Let rank 0 write it.",
        "all-print": "Every rank prints what rank 0 prints, so that torchrun shows it once for each. Let rank 0 print.",
        "wrapped-names": "The names in the file begin with `module.`, so that nobody can load it into the model. Save "
        "the state of the model inside of the wrapper.",
        "group-left-open": "The process group is still open at the end. Call `dist.destroy_process_group()` when all is "
        "saved.",
    },
    failures={
        "mutually exclusive with shuffle": "sampler-and-shuffle",
    },
)


@stage.requires("one rank runs it to the end, and logs each epoch", seconds=60)
def one_rank_runs_it_to_the_end(script, draw):
    trains_as_before(script, draw)
    ran = script.on(1, draw)
    expect([line["epoch"] for line in ran.log], list(range(EPOCHS)), what="the epochs in the log")
    expect(all(math.isfinite(line["loss"]) for line in ran.log), True, what="a finite loss")


@stage.requires("two and four ranks share out each epoch's windows, and each batch", seconds=60)
def ranks_share_out_the_windows(script, draw):
    for ranks in (2, 4):
        shares = script.trained_on(script.on(ranks, draw))
        sizes = {len(batch) for mine in shares for batch in mine}
        seen = [[i for batch in mine for i in batch] for mine in shares]
        if len(set(seen[0][: len(seen[0]) // EPOCHS])) > script.learned / ranks + BATCH:
            raise Wrong("no-sampler", expected="different windows", got="all of them on rank 0")
        expect(
            sizes,
            {BATCH // ranks},
            what="the windows in a rank's batch",
            likely={"whole-batch": {BATCH}, "last-batch": len(sizes) > 1},
        )
        for mine in seen:
            first, second = mine[: len(mine) // EPOCHS], mine[len(mine) // EPOCHS :]
            if first == second:
                raise Wrong("same-order", expected="another order in each epoch", got="the same")


@stage.requires("their parameters are those of one process", seconds=60)
def their_parameters_are_those_of_one(script, draw):
    [alone] = script.on(1, draw).ranks
    for ranks in (2, 4):
        all_ranks = [rank.parameters for rank in script.on(ranks, draw).ranks]
        likely = {
            "not-wrapped": lambda got: not same(got, [got[0]] * len(got)),
            "other-steps": True,
        }
        expect(all_ranks, [alone.parameters] * ranks, each="rank", likely=likely)


@stage.requires("the log has the mean loss over all ranks", seconds=60)
def the_log_has_the_mean_loss(script, draw):
    alone = script.on(1, draw).log
    for ranks in (2, 4):
        got = [line["loss"] for line in script.on(ranks, draw).log]
        expected = [line["loss"] for line in alone]
        likely = {"summed-loss": [ranks * loss for loss in expected], "own-loss": True}
        expect(got, expected, each="epoch", likely=likely)


@stage.requires("each held-out window counts once", seconds=60)
def each_held_out_window_counts_once(script, draw):
    alone = script.on(1, draw).log
    for ranks in (2, 4):
        ran = script.on(ranks, draw)
        read = [script.windows(batch) for rank in ran.ranks for batch in rank.batches]
        held_out = [i for each in read for i in each if i >= script.learned]
        times = {held_out.count(i) for i in range(script.learned, script.number)}
        expect(
            [line["held_out_loss"] for line in ran.log],
            [line["held_out_loss"] for line in alone],
            each="epoch",
            likely={
                "held-out-repeated": max(times) > EPOCHS,
                "held-out-left-out": min(times) < EPOCHS,
                "mean-of-means": True,
            },
        )


@stage.requires("rank 0 alone saves, logs and prints, and all ranks leave the group", seconds=60)
def rank_0_alone_saves_logs_and_prints(script, draw):
    ran = script.on(2, draw)
    saved = [rank.saves for rank in ran.ranks]
    expect(saved, [1, 0], what="calls of torch.save, by rank", likely={"all-save": all(saved)})
    wrapped = [name for name in ran.model if name.startswith("module.")]
    expect(
        wrapped, [], what="names in model.pt that are the wrapper's", likely={"wrapped-names": True}
    )
    if ran.ranks[1].logs:
        raise Wrong(
            "all-log", expected="a log that rank 0 opens", got="rank 1 opens it to write, too"
        )
    first, second = (rank.prints for rank in ran.ranks)
    if second and second >= first:
        got = f"rank 1 prints {second} times, and rank 0 {first} times"
        raise Wrong("all-print", expected="what rank 0 prints", got=got)
    if not all(rank.group_left for rank in ran.ranks):
        raise Wrong("group-left-open", expected="no process group at the end", got="one")
