"""Stage 6.7 of the learner's script: tensor ranks that share each layer, beside data ranks."""

from course_exercises.authoring import Wrong, expect, same
from course_exercises.authoring.scripts import BATCH, Ran, Stage, must_be_whole, trains_as_before

stage = Stage(
    "6.7",
    minutes=45,
    hints=[
        (
            "First the mesh: data ranks times tensor ranks. Everything that chapter 3 shared out between the ranks is "
            "shared out between the data ranks now; the tensor ranks of a group do the same, each with its part of the "
            "layers."
        ),
        (
            "`parallelize_module` takes a plan by the modules' names: wq, wk, wv, w1 and w3 by columns, wo and w2 by "
            "rows. Make the optimizer after it. `DistributedDataParallel` does not take cut parameters: average the "
            "gradients of the data group yourself, as in 3.1, on `parameter.grad.to_local()`."
        ),
        (
            "For the sequence, `SequenceParallel` for the norms, `PrepareModuleInput` from `Shard(1)` to `Replicate()` "
            "before attention and the feed-forward part, and `output_layouts=Shard(1)` behind wo, w2 and the embedding. "
            "To save, every rank calls `full_tensor()` on each entry of the state dict."
        ),
    ],
    misconceptions={
        "not-cut": "A rank still holds a large matrix whole. `parallelize_module` cuts those whose names are in its plan, and "
        "leaves out a name that it does not find.",
        "optimizer-first": "The optimizer moves parameters that are no longer in the model. Make it after "
        "`parallelize_module`, which puts new ones in their place.",
        "tensor-ranks-differ": "The ranks of a tensor group train on different windows. They are parts of one model: give "
        "the sampler the number of data ranks and this rank's number among them.",
        "divided-by-all": "Your batch is cut among all ranks. Only the data ranks share it out: `--batch` divided by their "
        "number.",
        "other-calls": "Ranks of a group make other calls, or hand over tensors of other shapes. Those of a tensor group have "
        "to do the same with the same windows, also with those that are held out: share them out among the data ranks.",
        "not-averaged": "Ranks with the same part of the model drift apart. Average the gradients over the data ranks "
        "after each backward.",
        "other-steps": "The parameters are not those of one rank. Does a gradient's mean go over the data group alone, and "
        "is it a mean? Over all ranks it would mix different parts of a matrix.",
        "own-loss": "The log is not the mean over the data ranks. Tensor ranks of a group have the same loss, which counts "
        "once.",
    },
    failures={"closes the connections": "not-every-rank", "mismatch": "other-calls"},
)


@stage.requires("one rank trains as before", seconds=60)
def one_rank_trains_as_before(script, draw):
    trains_as_before(script, draw, tensor=1)


@stage.requires("two tensor ranks hold half of each large matrix", seconds=60)
def two_tensor_ranks_hold_half(script, draw):
    whole = max(part.numel() for part in script.on(1, draw, tensor=1).ranks[0].parameters)
    for rank in script.on(2, draw, tensor=2).ranks:
        largest = max(part.numel() for part in rank.parameters)
        if largest > whole // 2:
            name = "not-cut" if rank.moves_the_model else "optimizer-first"
            parameters = script.on(1, draw, tensor=1).model.items()
            names = [name for name, value in parameters if value.numel() == largest]
            got = f"one of {largest} on a rank, as large as {' and '.join(names[:2])}"
            raise Wrong(name, expected=f"no part of more than {whole // 2} numbers", got=got)


@stage.requires("the ranks of a tensor group train on the same windows", seconds=60)
def ranks_of_a_group_train_on_the_same(script, draw):
    for ranks in (2, 4):
        groups = _by_group(script.trained_on(script.on(ranks, draw, tensor=2)))
        for one, other in groups:
            expect(
                one == other, True, what="the same windows", likely={"tensor-ranks-differ": True}
            )
        sizes = {len(batch) for one, _ in groups for batch in one}
        expect(
            sizes,
            {2 * BATCH // ranks},
            what="the windows in a batch",
            likely={"divided-by-all": {BATCH // ranks}},
        )


def _by_group(by_rank: list) -> list[tuple]:
    """What two tensor ranks of a group have, by group: tensor changes fastest."""
    return list(zip(by_rank[::2], by_rank[1::2], strict=True))


@stage.requires("they end with the parameters of one rank", seconds=60)
def they_end_with_the_parameters_of_one(script, draw):
    alone = script.on(1, draw, tensor=1)
    for ranks in (2, 4):
        ran = script.on(ranks, draw, tensor=2)
        must_be_whole(ran, alone)
        likely = {"not-averaged": not _copies_agree(ran), "other-steps": True}
        expect(ran.model, alone.model, likely=likely)


def _copies_agree(ran: Ran) -> bool:
    parts = [rank.parameters for rank in ran.ranks]
    return all(same(mine, parts[rank % 2]) for rank, mine in enumerate(parts))


@stage.requires("the log is that of one rank", seconds=60)
def the_log_is_that_of_one_rank(script, draw):
    alone = script.on(1, draw, tensor=1).log
    for ranks in (2, 4):
        log = script.on(ranks, draw, tensor=2).log
        for of in ("loss", "held_out_loss"):
            got, expected = [line[of] for line in log], [line[of] for line in alone]
            expect(got, expected, what=of, each="epoch", likely={"own-loss": True})
