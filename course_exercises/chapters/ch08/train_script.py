"""Stage 8.6 of the learner's script: shards in place of copies."""

import torch

from course_exercises.authoring import Wrong, expect
from course_exercises.authoring.scripts import Stage, must_be_whole, trains_as_before

stage = Stage(
    "8.6",
    minutes=40,
    hints=[
        (
            "`fully_shard` takes the place of what averaged your gradients: first each block, then the whole model, on "
            "the data ranks' part of the mesh. The optimizer comes after it."
        ),
        (
            "Under `torch.device('meta')` the model has shapes only. After `fully_shard`, `model.to_empty(device=...)` "
            "gives each rank memory for its part, and the part its first values: they must not depend on the number of "
            "ranks. `distribute_tensor` cuts a whole tensor as a parameter is cut."
        ),
        (
            "Every forward pass gathers, so all ranks make as many, with held-out windows too. "
            "`dcp.save({'model': model.state_dict()}, checkpoint_id=...)` is called by all ranks, and each writes its part. "
            "For `--bfloat16`, `MixedPrecisionPolicy(param_dtype=..., reduce_dtype=torch.float32)` computes in bfloat16 "
            "and keeps the parameters in float32."
        ),
    ],
    misconceptions={
        "not-sharded": "The ranks hold more than their share of the parameters between two steps, and so of their "
        "gradients and the optimizer's state. Call `fully_shard` on the blocks and on the model, and make the optimizer "
        "after that.",
        "optimizer-first": "The optimizer has parameters that are no longer in the model, so that nothing is learned. "
        "`fully_shard` and `to_empty` put new ones in their place: make the optimizer after both.",
        "one-unit": "`fully_shard` was called for the model alone, so that all of it is gathered before the first layer "
        "computes. Call it for each block first: then a rank holds one block at a time.",
        "whole-at-first": "A rank had memory for a whole matrix while the model was made. A model that needs shards does "
        "not fit then: build it under `torch.device('meta')`, shard it, and call `to_empty` after that.",
        "other-start": "On other numbers of ranks the model begins with other values. Draw each parameter as a whole from a "
        "seed of its own, on every rank, and keep the rank's part.",
        "other-steps": "The parameters are not those of one rank. FSDP takes the mean over the data ranks by itself: do not "
        "average once more, and share out the batch among the data ranks.",
        "held-out-waits": "The ranks have different numbers of held-out batches, and with shards every forward pass gathers: "
        "one rank waits for calls that the others never make. Give all ranks as many: `DistributedSampler(held_out, "
        "data_ranks, rank, shuffle=False)` repeats windows until they have.",
        "held-out-repeated": "The held-out loss is not that of one rank. A `DistributedSampler` repeats windows: only the first "
        "`len(range(rank, len(held_out), data_ranks))` of a rank's count.",
        "no-checkpoint": "The folder `checkpoint` has no checkpoint of torch.distributed.checkpoint with the model under "
        "'model', by the names of the model that is not wrapped.",
        "kept-in-bfloat16": "With `--bfloat16` the parameters themselves are bfloat16, and small updates get lost. Only the "
        "computation is to be in it: that is a policy of `fully_shard`.",
        "still-float32": "With `--bfloat16` all is as without it. Give `fully_shard` a `MixedPrecisionPolicy`, for the "
        "blocks too.",
    },
)


stage.requires("one rank trains as before", seconds=60)(trains_as_before)


@stage.requires("each rank holds its share, and never had more", seconds=60)
def each_rank_holds_its_share(script, draw):
    ran, model = script.on(4, draw), script.on(1, draw).model
    whole = sum(value.numel() for value in model.values())
    for rank in ran.ranks:
        if not rank.parameters:
            raise Wrong(
                "optimizer-first", expected="the model's parameters in the optimizer", got="others"
            )
        held = sum(part.numel() for part in rank.parameters)
        if held > 0.4 * whole:  # 17 rows, for instance, do not divide by 4
            raise Wrong("not-sharded", expected=f"about {whole // 4} numbers on a rank", got=held)
        if rank.shardings == 1:
            raise Wrong("one-unit", expected="a call for each block, and one", got="one in all")
        largest = max(value.numel() for value in model.values())
        if rank.largest > largest // 2:
            raise Wrong(
                "whole-at-first", expected="parts alone", got=f"a parameter of {rank.largest}"
            )


@stage.requires("they end with the parameters of one rank", seconds=60)
def they_end_with_the_parameters_of_one(script, draw):
    alone = script.on(1, draw)
    for ranks, tensor in ((2, 1), (4, 1), (4, 2)):
        ran = script.on(ranks, draw, tensor=tensor)
        must_be_whole(ran, alone)
        expect(
            ran.model, alone.model, likely={"other-start": _far(ran, alone), "other-steps": True}
        )


def _far(ran, alone) -> bool:
    """Whether the models differ by more than training moves them."""
    pairs = ((ran.model[name], alone.model[name]) for name in alone.model)
    return max((one - other).abs().max().item() for one, other in pairs) > 0.5


@stage.requires("the log is that of one rank", seconds=60)
def the_log_is_that_of_one_rank(script, draw):
    alone = script.on(1, draw).log
    log = script.on(4, draw).log
    for of, likely in (("loss", {}), ("held_out_loss", {"held-out-repeated": True})):
        got, expected = [line[of] for line in log], [line[of] for line in alone]
        expect(got, expected, what=of, each="epoch", likely=likely)


@stage.requires(
    "ranks may have different numbers of held-out windows",
    seconds=60,
    failures={"timeout": "held-out-waits", "mismatch": "held-out-waits"},
)
def ranks_may_have_different_numbers(script, draw):
    # Of five windows one rank has three, the other two: in batches of two, two batches and one.
    script.on(2, draw, batch=4)


@stage.requires("one process can load the checkpoint of four ranks", seconds=60)
def one_process_can_load_the_checkpoint(script, draw):
    ran = script.on(4, draw)
    expect(ran.checkpoint, ran.model, likely={"no-checkpoint": True})


@stage.requires("with --bfloat16 it computes in bfloat16, and keeps float32", seconds=60)
def with_bfloat16_it_computes_in_it(script, draw):
    plain, ran = script.on(2, draw), script.on(2, draw, bfloat16=True)
    kept = {part.dtype for rank in ran.ranks for part in rank.parameters}
    expect(kept, {torch.float32}, what="the parameters' dtypes", likely={"kept-in-bfloat16": True})
    difference = abs(ran.log[-1]["loss"] - plain.log[-1]["loss"])
    if difference == 0 or difference > 0.5:
        raise Wrong(
            "still-float32",
            expected="nearly the loss of float32",
            got=f"a difference of {difference:.2g}",
        )
