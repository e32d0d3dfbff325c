"""Stage 12.5 of the learner's script: what trains on two ranks is traced as one rank of 1,024."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from course_exercises.authoring import Wrong, expect
from course_exercises.authoring.scripts import Script, Stage, trains_as_before
from course_exercises.authoring.traced_script import as_one_rank, defined_in
from course_planner import Layout, Trace
from course_utils.launch import RankFailure

LARGE = 128, 8  # data ranks, and tensor ranks
# Each dimension of a parameter divides by the ranks that share it.
SHAPE = {"width": 2048, "heads": 16, "kv_heads": 8, "context": 1024}
_CALLED = "main has called the step"


@dataclass
class Rehearsed(Script):
    """The learner's file, its runs, and its traces, all of one shape; with the same sizes it is traced once."""

    _shape: dict[str, int] = field(default_factory=dict)
    _traces: dict[tuple, Trace] = field(default_factory=dict)

    def small(self, draw) -> tuple[int, int]:
        """Data ranks and tensor ranks of a small world."""
        self._draw_shape(draw)
        return self._shape["data"], 8 // self._shape["data"]

    def traced(self, draw, sizes: tuple[int, int], layers: int, **options: int) -> Trace:
        self._draw_shape(draw)
        asked = *sizes, layers, *options.items()
        if asked not in self._traces:
            (dp, tp), vocabulary = sizes, self._shape["vocabulary"]
            layout, rank = Layout(dp=dp, tp=tp, zero=3), self._shape["rank"] % (dp * tp)
            options = SHAPE | {"layers": layers} | options
            self._traces[asked] = as_one_rank(
                self.path, layout, rank, vocabulary=vocabulary, **options
            )
        return self._traces[asked]

    def layer(self, draw, sizes: tuple[int, int], group: str, op: str) -> int:
        """The bytes that a rank sends for one layer in a step, by all such calls to this group."""
        one, two = (_sent(self.traced(draw, sizes, layers), group, op) for layers in (1, 2))
        return two - one

    def _draw_shape(self, draw) -> None:
        if not self._shape:
            self._shape = {"data": draw.choice((2, 4)), "rank": draw.integer(0, 1023)}
            self._shape["vocabulary"] = 1024 * draw.integer(1, 3)


stage = Stage(
    "12.5",
    minutes=30,
    runs=Rehearsed,
    hints=[
        (
            "Which lines of `main` would be the same for a thousand ranks? Those that make the model, cut it, shard it, give "
            "it memory and its first values, and make the optimizer; and the four lines of a step. They move into "
            "`program` as they are."
        ),
        (
            "The mesh is all that `program` may know of the other ranks: `mesh['tensor'].size()`, `mesh['data']`, and the "
            "kind of device, `mesh.device_type`. The process group, the files and the signals stay in `main`."
        ),
        (
            "A traced tensor has a shape and no value, so a step returns its loss as a tensor, and `main` asks for "
            "`loss.item()`. `main` gets the model and the optimizer from `program` for its checkpoints."
        ),
    ],
    misconceptions={
        "no-program": "The file has no function `program(mesh, options, vocabulary)`. Move into it what `main` does to "
        "build the model, and the lines of a step.",
        "runs-on-import": "The file trains as soon as it is imported. Call `main()` under `if __name__ == '__main__':` only.",
        "returns-something-else": "`program` returns three things: the model, its optimizer, and a function "
        "`step(inputs, targets)`, which returns the loss.",
        "asks-for-a-value": "Your program asks for a tensor's value, such as `loss.item()`. One rank alone cannot know it, "
        "since it depends on the others. Return tensors, and ask for values in `main`.",
        "reads-the-environment": "`program` reads a variable that torchrun sets. What it needs to know of the other ranks "
        "is in the mesh: `mesh['data'].size()`, `mesh.get_local_rank('tensor')`.",
        "own-group": "`program` calls `init_process_group`. Who calls it has made the group and the mesh already: leave "
        "both in `main`.",
        "not-used": "`main` trains without `program`, or with a step of its own, so a trace shows another program than the "
        "one that trains. Let `main` call it, and use its step.",
        "optimizer-first": "The optimizer has none of the parameters that are trained. `fully_shard` puts new ones in "
        "place of the model's: make the optimizer after it.",
        "not-cut": "A rank holds as many times its share as there are tensor ranks. Call `cut` in `program` with "
        "`mesh['tensor']`.",
        "not-sharded": "A rank holds as many times its share as there are data ranks. Call `shard` in `program` with "
        "`mesh['data']`, and take the sizes from the mesh alone.",
        "whole-state": "Parameters are shared out, and the optimizer's state is not. Make it from a rank's own part, as "
        "PyTorch's optimizers do once the model is sharded.",
        "kept-whole": "Between two steps a rank keeps much more than parameters, gradients and the optimizer's state. A "
        "whole copy of the parameters, for instance, fits no GPU of a large run. Keep what belongs to the rank's own part.",
        "whole-at-first": "While `program` builds the model, a rank has memory for most of it. Build it under "
        "`torch.device('meta')`, and call `to_empty` when it is cut and sharded.",
        "dimensions-swapped": "`cut` and `shard` have not each got their own ranks. `cut` needs `mesh['tensor']`, and "
        "`shard` needs `mesh['data']`.",
        "one-unit": "However many layers there are, the data ranks gather as often: all of the model at once. Call "
        "`fully_shard` for each block, then for the model.",
        "not-summed": "The data ranks never add up their gradients. In a step, `fully_shard` does so by itself in "
        "backward, unless `set_requires_gradient_sync(False)` tells it not to.",
        "averaged-again": "Besides what `fully_shard` sends, the data ranks all-reduce their gradients. They are averaged "
        "already: take that out of the step.",
        "gathers-whole": "The data ranks gather more than each block's parameters for its two passes. In a step, "
        "`full_tensor()` sends the whole model once more: use a rank's own part, `to_local()`.",
        "still-float32": "With `--bfloat16` the data ranks gather as many bytes as without it. Give `shard` the options "
        "that `program` gets.",
        "other-steps": "On several ranks the script ends with other parameters than on one. `fully_shard` takes the mean "
        "over the data ranks by itself: see that your step does not divide once more.",
    },
    failures={
        "exit(2)": "refused-options",
        "needs the value of a tensor": "asks-for-a-value",
        "KeyError: 'WORLD_SIZE'": "reads-the-environment",
        "KeyError: 'RANK'": "reads-the-environment",
        "KeyError: 'LOCAL_RANK'": "reads-the-environment",
        "process group twice": "own-group",
        "values to unpack": "returns-something-else",
        "cannot unpack": "returns-something-else",
        "'NoneType' object has no attribute 'item'": "returns-something-else",
        "overlapping meshes": "dimensions-swapped",
    },
)


stage.requires(
    "one rank trains as before",
    seconds=60,
    # a checkpoint cannot have those that the model had before
    failures={"copy out of meta tensor": "optimizer-first"},
)(trains_as_before)


@stage.requires("its program builds one rank of a small world, and does a step", seconds=60)
def its_program_is_one_rank(script, draw):
    try:
        defined = defined_in(script.path)
    except SystemExit:
        raise Wrong("runs-on-import", expected="definitions", got="a program that runs") from None
    if not callable(defined.get("program")):
        raise Wrong("no-program", expected="a function program", got="none")
    script.traced(draw, script.small(draw), layers=1)


@stage.requires("it is what trains", seconds=60)
def it_is_what_trains(script, draw):
    with tempfile.TemporaryDirectory() as folder:
        without = Path(folder, "train.py")
        without.write_text(_WITHOUT.format(path=str(script.path.resolve()), called=_CALLED))
        try:
            Script(without).on(1, draw)
        except RankFailure as failure:
            if _CALLED in str(failure):
                return
            raise
    raise Wrong("not-used", expected="a main that takes program's steps", got="none of them")


# A script whose `program` has a step that trains nothing.
_WITHOUT = """
import runpy

def program(*given, **named):
    model, optimizer, _ = own(*given, **named)
    return model, optimizer, step

def step(*_, **__):
    raise RuntimeError("{called}")

main = runpy.run_path({path!r}, run_name="train")["main"]
own = main.__globals__.get("program")
main.__globals__["program"] = program
main()
"""


@stage.requires("in a small world a rank holds its share between two steps", seconds=60)
def a_rank_holds_its_share(script, draw):
    holds_its_share(script, draw, script.small(draw))


@stage.requires("in a small world it sends what the plan says", seconds=60)
def it_sends_what_the_plan_says(script, draw):
    sends_as_planned(script, draw, script.small(draw))


@stage.requires("so does one of 1,024 ranks", seconds=60, needs_earlier=True)
def so_does_one_of_many(script, draw):
    holds_its_share(script, draw, LARGE)
    sends_as_planned(script, draw, LARGE)


@stage.requires("it has never held the whole model", seconds=60, needs_earlier=True)
def it_has_never_held_the_whole_model(script, draw):
    whole = script.traced(draw, (1, 1), layers=2).kept["parameters"]
    building = script.traced(draw, LARGE, layers=2).building
    if building > 0.6 * whole:
        raise Wrong(
            "whole-at-first",
            expected="parts, and a matrix at a time",
            got=f"{building:,} bytes of {whole:,}",
        )


@stage.requires("with --bfloat16 it gathers half the bytes", seconds=60, needs_earlier=True)
def with_bfloat16_it_gathers_half(script, draw):
    sizes = script.small(draw)
    plain, half = (
        _sent(script.traced(draw, sizes, layers=1, **options), "dp", "all_gather")
        for options in ({}, {"bfloat16": True})
    )
    expect(half, plain / 2, what="bytes gathered", likely={"still-float32": plain})


@stage.requires("two ranks and four end with the parameters of one", seconds=60, needs_earlier=True)
def more_ranks_train_as_one(script, draw):
    alone = script.on(1, draw)
    for ranks, tensor in ((2, 1), (4, 2)):
        ran = script.on(ranks, draw, tensor=tensor)
        expect(ran.model, alone.model, likely={"other-steps": True})


def holds_its_share(script: Rehearsed, draw, sizes: tuple[int, int]) -> None:
    """Between two steps: of the parameters, of the optimizer's state, which may be two of them, and of the gradients,
    unless a step ends without. A norm is whole on each tensor rank, which is little."""
    dp, tp = sizes
    whole = script.traced(draw, (1, 1), layers=1).kept["parameters"]
    kept, share = script.traced(draw, sizes, layers=1).kept, whole / (dp * tp)

    def wrong(name: str, got: int, more: str = "") -> Wrong:
        return Wrong(name, expected=f"about {share:,.0f} bytes{more}", got=f"{got:,} bytes")

    if not kept["parameters"]:
        raise Wrong("optimizer-first", expected="an optimizer of the parameters", got="of none")
    if kept["parameters"] > 1.1 * share:
        uncut = _near(kept["parameters"], tp * share, 0.1)
        raise wrong("not-cut" if uncut else "not-sharded", kept["parameters"])
    if not script.layer(draw, sizes, "dp", "reduce_scatter"):
        raise Wrong("not-summed", expected="a reduce-scatter for each layer", got="none")
    if kept["optimizer"] > 2.2 * share:
        raise wrong("whole-state", kept["optimizer"], ", or two of them")
    others = sum(kept[kind] for kind in ("gradients", "gathered", "activations"))
    if others > 1.1 * share:
        raise wrong("kept-whole", others, " of gradients")


def sends_as_planned(script: Rehearsed, draw, sizes: tuple[int, int]) -> None:
    """For a layer, by `estimate.traffic`: its parameters are gathered for both passes, or once, and their gradients
    are summed; tensor ranks exchange a window's vectors eight times, and more where the sequence is not cut."""
    dp, tp = sizes
    one, two = (script.traced(draw, (1, 1), layers).kept["parameters"] for layers in (1, 2))

    def part(cut: int, shards: int) -> float:
        """The bytes that one of `shards` ranks sends to gather, or sum up, its part of a layer's parameters."""
        return (two - one) / cut * (shards - 1) / shards

    def sent(group: str, *ops: str) -> int:
        return sum(script.layer(draw, sizes, group, op) for op in ops)

    def wrong(name: str | None, expected: float, got: float) -> Wrong:
        return Wrong(name, expected=f"{expected:,.0f} bytes a layer", got=f"{got:,}")

    expected = part(tp, dp)
    summed, gathered = sent("dp", "reduce_scatter"), sent("dp", "all_gather")
    if not _near(summed, expected):
        swapped = _near(sent("tp", "reduce_scatter"), part(dp, tp))
        raise wrong("dimensions-swapped" if swapped else None, expected, summed)
    if _gathers(script.traced(draw, sizes, 1)) == _gathers(script.traced(draw, sizes, 2)):
        raise Wrong("one-unit", expected="gathers for each block", got="one for all of them")
    if again := sent("dp", "all_reduce"):
        raise wrong("averaged-again", 0, again)
    if not any(_near(gathered, passes * expected) for passes in (1, 2)):
        raise wrong("gathers-whole", 2 * expected, gathered)
    vectors = 4 * SHAPE["context"] * SHAPE["width"] * (tp - 1) / tp
    exchanged = sent("tp", "all_gather", "reduce_scatter", "all_reduce")
    if not 7.9 * vectors < exchanged < 16 * vectors:
        raise wrong(None, 8 * vectors, exchanged)


def _gathers(trace: Trace) -> int:
    return sum(c.calls for c in trace.calls if (c.group, c.op) == ("dp", "all_gather"))


def _near(got: float, expected: float, share: float = 0.02) -> bool:
    return abs(got - expected) <= share * expected


def _sent(trace: Trace, group: str, op: str) -> int:
    return sum(call.sent for call in trace.calls if (call.group, call.op) == (group, op))
