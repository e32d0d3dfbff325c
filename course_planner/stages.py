"""What each stage of a pipeline holds."""

from dataclasses import dataclass

from course_planner import counting
from course_planner.descriptions import Layout, Model


@dataclass(frozen=True)
class Stage:
    """What a stage holds; layers: of all its chunks; dense: those among them without experts;
    head: the output layer."""

    index: int
    layers: int
    dense: int
    embedding: bool
    head: bool


def stages_of(model: Model, layout: Layout, seq: int) -> list[Stage]:
    """What each stage holds. Raises ValueError as `Layout.check` does."""
    layout.check(model, seq)
    counts, found, before = _layers(model, layout, seq), [], 0
    for at, held in enumerate(counts):
        dense = max(min(model.dense - before, held), 0)
        found.append(Stage(at, held, dense, at == 0, at == layout.pp - 1))
        before += held
    return found


def _layers(model: Model, layout: Layout, seq: int) -> list[int]:
    """`Layout.stage_layers`, but where the last stage has an output layer that takes longer than
    the others' layers: there it holds as many fewer as make the slowest stage quickest, if that
    saves half a layer.

    That is how nanotron splits a small model with a large vocabulary. With chunks nobody does.
    """
    even = layout.stage_layers(model.layers)
    others = layout.pp - 1
    if not others or layout.chunks > 1:
        return even
    layer = counting.matrices_visited(model) + seq * model.heads * model.score_size
    head = model.vocab * model.width / layer  # in layers; attention's core is causal

    def pace(last: int) -> float:
        return max(-(-(model.layers - last) // others), last + head)

    last = min(range(even[-1] + 1), key=pace)
    if pace(last) > max(max(even), even[-1] + head) - 0.5:
        return even
    fewest, more = divmod(model.layers - last, others)
    return [fewest + (at < more) for at in range(others)] + [last]


def telling(stages: list[Stage]) -> list[Stage]:
    """The first stage with each number of layers, and the last: the others hold no more.

    Stages that hold equally many layers differ by what is in flight, which no later stage has more
    of, and by the tables at the ends. Where the ends hold fewer layers, the fullest may be the
    second (Llama 3's 126 on 16 stages). Dense layers are fewer parameters than experts.
    """
    first = {(stage.layers, stage.dense): stage for stage in reversed(stages)}
    return [stage for stage in stages if stage.head or stage is first[stage.layers, stage.dense]]
