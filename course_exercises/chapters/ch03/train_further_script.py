"""Stage 3.7 of the learner's script: accumulated micro-batches, the loss per character, and a stream."""

from collections import Counter

from course_exercises.authoring import Wrong, expect
from course_exercises.authoring.scripts import EPOCHS, Stage, trains_as_before

stage = Stage(
    "3.7",
    minutes=45,
    further=True,
    hints=[
        (
            "Begin with the sentences on one rank: an `IterableDataset`, a `collate_fn` that fills the rows up with "
            "`pad_sequence`, and a loss that leaves those places out (`ignore_index`). Then accumulate, then share out."
        ),
        (
            "The mean over the characters of a step needs their number before the first backward: add it up over the "
            "micro-batches and the ranks. Each micro-batch's summed loss is divided by it, and multiplied by the world "
            "size, since DDP divides by that."
        ),
        (
            "Number the micro-batches of the whole stream. Number m belongs to rank `m % world`, and there to worker "
            "`m // world % workers` (`get_worker_info()`). Stop where the last whole batch of all ranks ends. All "
            "backward passes of a step but the last run under `parallel.no_sync()`."
        ),
    ],
    misconceptions={
        "read-by-all-ranks": "Several ranks read the same sentences. A `DataLoader` deals an `IterableDataset` out to "
        "nobody: let each rank take its own part of the stream.",
        "read-by-all-workers": "A rank reads a sentence once for each of its workers. Each worker has the whole dataset: "
        "ask `get_worker_info()` which part is the worker's.",
        "left-out": "Some sentences are read more or less often than they should be: once in an epoch, and those at the end, "
        "which fill no batch of all ranks, never.",
        "by-micro-batch": "On one rank the gradient changes with `--accumulate`. The loss of a micro-batch is divided by "
        "its own characters, or by no number, or places that only fill up a row count. Divide each summed loss by the "
        "characters of the whole step.",
        "by-rank": "One rank is right, and several have another gradient than one. Each divides by its own characters, "
        "and the mean over ranks then weighs long and short sentences alike. Add up the characters over the ranks first.",
        "divided-by-world": "The gradient is that of one rank divided by the world size. DDP takes the mean over the "
        "ranks, and your loss is divided by the characters of all ranks already: multiply it by the world size.",
        "synced-each-time": "The gradients travel after each micro-batch. Run all backward passes but the step's last "
        "under `no_sync()`, with their forward passes.",
        "never-synced": "The gradients of a step never travel. The last micro-batch runs without `no_sync()`.",
        "loss-by-batch": "The loss in the log is not the mean over all characters of the epoch. Add up losses and "
        "characters, over steps and ranks, and divide then.",
        "held-out-by-batch": "The held-out loss is not the mean over all characters that are held out.",
    },
)  # fmt: skip
SENTENCES = {"sentences": True, "context": 12}


stage.requires("one rank trains as before", seconds=60)(trains_as_before)


@stage.requires("each sentence is read once an epoch, by one worker of one rank", seconds=60)
def each_sentence_is_read_once(script, draw):
    for ranks, workers in ((1, 0), (1, 2), (2, 2), (4, 0)):
        ran = script.on(ranks, draw, workers=workers, **SENTENCES)
        read = [Counter(script.sentences_learned(rank)) for rank in ran.ranks]
        times = sum(read, Counter())
        expected = dict.fromkeys(range(script.sentences_in_batches), EPOCHS)
        likely = {
            "read-by-all-ranks": ranks > 1 and bool(read[0].keys() & read[1].keys()),
            "read-by-all-workers": workers > 1 and max(read[0].values(), default=0) > EPOCHS,
            "left-out": True,
        }
        on = f"how often each sentence is read (ranks: {ranks}, workers: {workers})"
        expect(dict(sorted(times.items())), expected, what=on, likely=likely)


@stage.requires("accumulated micro-batches have the gradient of the whole batch", seconds=60)
def accumulated_micro_batches(script, draw):
    whole = script.on(1, draw, **SENTENCES)
    for accumulate in (2, 4):
        ran = script.on(1, draw, accumulate=accumulate, **SENTENCES)
        got, expected = ran.ranks[0].gradient, whole.ranks[0].gradient
        expect(got, expected, what="the first step's gradient", likely={"by-micro-batch": True})
        expect(ran.model, whole.model, likely={"by-micro-batch": True})


@stage.requires("and so have several ranks", seconds=60)
def several_ranks(script, draw):
    whole = script.on(1, draw, **SENTENCES)
    expected = whole.ranks[0].gradient
    for ranks, accumulate in ((2, 1), (4, 2)):
        ran = script.on(ranks, draw, accumulate=accumulate, **SENTENCES)
        likely = {"divided-by-world": expected / ranks, "by-rank": True}
        expect(ran.ranks[0].gradient, expected, what="the first step's gradient", likely=likely)
        expect(ran.model, whole.model, likely={"by-rank": True})


@stage.requires("a step's gradients travel once", seconds=60)
def gradients_travel_once(script, draw):
    ran = script.on(2, draw, accumulate=4, **SENTENCES)
    for rank in ran.ranks:
        steps, synced = len(rank.stepped), sum(rank.synced)
        name = "synced-each-time" if synced > steps else "never-synced"
        if synced != steps:
            raise Wrong(name, expected=f"once in each of {steps} steps", got=f"{synced} times")


@stage.requires("the log has the loss per character", seconds=60)
def the_log_has_the_loss_per_character(script, draw):
    whole = script.on(1, draw, **SENTENCES).log
    log = script.on(4, draw, accumulate=2, **SENTENCES).log
    for of, name in (("loss", "loss-by-batch"), ("held_out_loss", "held-out-by-batch")):
        expected = [line[of] for line in whole]
        expect([line[of] for line in log], expected, what=of, each="epoch", likely={name: True})
