"""Exercise 8.5, `reshard`: what it asks for, and how it is checked."""

import copy
import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, same
from course_exercises.authoring.ranks import storages
from course_exercises.chapters.ch08.shared import drawn_tensor, larger_than_itself, shards_of

resharding = Exercise(
    "8.5",
    "reshard",
    points=3,
    minutes=40,
    kind="core",
    things="tensors",
    parameters=("checkpoints", "world_size"),
    hints=[
        (
            "Take one parameter at a time: put its shards together, drop the padding, and cut again. Its "
            "whole shape tells how much of the vector is real."
        ),
        (
            "What is cut, and what is the same on every rank? Decide by the shape of the parameter, and, "
            "for the optimizer's values, by whether they have a dimension at all."
        ),
        (
            "Sort the parts by their rank and compare with what the run must have had. Write one function "
            "that turns the old ranks' values into the new ranks' values, by the parameter's shape. Use "
            "it for parameters and for each entry of the optimizer's state; clone what you cut."
        ),
    ],
    misconceptions={
        "order": "The shards are put together in another order than that of the ranks: that of the list, or that "
        "of the ranks as text, where 10 comes before 2. Each part tells its `rank`: sort by it.",
        "what-is-cut": "You cut what is the same on every rank, or leave whole what is cut. Parameters with two or "
        "more dimensions are cut, and so are their optimizer's tensors that have a dimension, not numbers and "
        "Adam's `step`. Ask a value for its `dim()`, not `numel()`: a shard may have one element.",
        "pieces": "A new shard is not the right piece of its parameter. Put all old shards together and drop the old "
        "padding, as the whole shape tells; pad once, at the end; cut that into equal vectors, one for each "
        "new rank, of zeros only where there are more ranks than elements.",
        "optimizer-left": "The parameters are right, and their optimizer's state is not: it is missing, cut as before, "
        "or there where a parameter had none. Momentum has the shape of its shard: it is resharded as the "
        "parameter is. Without it training goes on, but not as before.",
        "labels": "`rank` and `world_size` of the new parts are those of the new run.",
        "not-refused": "Parts that are no whole checkpoint must raise a ValueError, before anything else goes wrong, "
        "whose message names a rank that is missing. Whole are the parts of ranks 0 to n - 1, each once, all "
        "of a run on n ranks. An empty list has none of them.",
        "memory": "A new tensor shares its memory: with the whole that it was cut out of, which a rank would save "
        "along with it, or with another part, which the next step would change. `clone()` what you cut, and what "
        "you do not cut, too.",
    },
    failures={"zero-dimensional": "what-is-cut"},
)


def _shapes(draw) -> dict[str, tuple[int, ...]]:
    """Of a small model: a matrix that 3 ranks do not divide, and one that 2 and 4 do not."""
    up = draw.choice(((5, 4), (4, 5), (2, 10), (11, 2)))
    down = draw.choice(((3, 5), (5, 3), (13, 1), (1, 11)))
    return {"up.weight": up, "up.bias": up[:1], "down.weight": down, "scale": ()}


def _entry_shards(whole: Tensor, ranks: int) -> list[Tensor]:
    if whole.dim() < 2:
        return [whole.clone() for _ in range(ranks)]
    return shards_of(whole, ranks)


def _checkpoint(parameters: dict, states: dict, ranks: int) -> list[dict]:
    """The parts of a checkpoint, from whole tensors; numbers in `states` are the same everywhere."""

    def state_of(name: str, rank: int) -> dict:
        return {
            key: _entry_shards(value, ranks)[rank] if torch.is_tensor(value) else value
            for key, value in states[name].items()
        }

    return [
        {
            "rank": rank,
            "world_size": ranks,
            "shapes": {name: whole.shape for name, whole in parameters.items()},
            "parameters": {n: _entry_shards(p, ranks)[rank] for n, p in parameters.items()},
            "optimizer": {name: state_of(name, rank) for name in states},
        }
        for rank in range(ranks)
    ]


def _wholes(draw, shapes=None, stateless=(), dtype=torch.float32) -> tuple[dict, dict]:
    """Whole parameters, in this dtype, and the states of Adam, which are float32."""
    shapes = shapes or _shapes(draw)
    parameters = {name: drawn_tensor(draw, shape).to(dtype) for name, shape in shapes.items()}
    states = {
        name: {
            "step": torch.tensor(float(draw.integer(3, 9))),
            "exp_avg": drawn_tensor(draw, shape),
            "exp_avg_sq": drawn_tensor(draw, shape).square(),
        }
        for name, shape in shapes.items()
        if name not in stateless
    }
    return parameters, states


def _mistakes(old: list[dict], listed: list[int], expected: list[dict]) -> dict:
    """`listed` are the old ranks in the order of the list that was handed in."""
    shapes, ranks = old[0]["shapes"], len(expected)
    cut = [name for name, shape in shapes.items() if len(shape) > 1]

    def parameters(parts: list[dict], names: Iterable[str]) -> list[dict]:
        return [{name: part["parameters"].get(name) for name in names} for part in parts]

    def steps(parts: list[dict]) -> list[list]:
        return [[state.get("step") for state in part["optimizer"].values()] for part in parts]

    def put_together(order: list[int]) -> list[dict]:
        shards = {name: [old[rank]["parameters"][name] for rank in order] for name in cut}
        wholes = {name: torch.cat(shards[name])[: shapes[name].numel()] for name in cut}
        return [{n: shards_of(w, ranks)[rank] for n, w in wholes.items()} for rank in range(ranks)]

    def in_another_order(got: list[dict]) -> bool:
        orders = [o for o in (listed, sorted(listed, key=str)) if o != sorted(listed)]
        return any(same(parameters(got, cut), put_together(order)) for order in orders)

    def another_is_cut(got: list[dict]) -> bool:
        uncut = set(shapes) - set(cut)
        first = {name: parameters([old[0]] * ranks, [name]) for name in cut}  # as if each had it
        return (
            not same(parameters(got, uncut), parameters(expected, uncut))
            or any(
                same(parameters(got, [name]), first[name])
                and not same(parameters(expected, [name]), first[name])
                for name in cut
            )
            or (all(part["optimizer"] for part in got) and not same(steps(got), steps(expected)))
        )

    def dtypes(parts: list[dict]) -> list[list]:
        return [[tensor.dtype for tensor in _tensors_of(part)] for part in parts]

    return {
        "other-dtype": lambda got: all(
            len(own) == len(right) and own != right
            for own, right in zip(dtypes(got), dtypes(expected), strict=True)
        ),
        "order": in_another_order,
        "what-is-cut": another_is_cut,
        "pieces": lambda got: not same(parameters(got, cut), parameters(expected, cut)),
        "optimizer-left": True,
    }


def _tensors_of(part: dict) -> Iterator[Tensor]:
    yield from part["parameters"].values()
    for state in part["optimizer"].values():
        yield from (value for value in state.values() if torch.is_tensor(value))


def _check(answer, before: int, after: int, wholes: tuple[dict, dict], shuffled=False) -> None:
    old, expected = (_checkpoint(*wholes, ranks) for ranks in (before, after))
    listed = list(range(before))[:: -1 if shuffled else 1]
    handed = [copy.deepcopy(old[rank]) for rank in listed]
    got = answer(handed, after)
    expect_type(got, (list, tuple))
    if len(got) != after:
        raise Wrong("pieces", expected=f"{after} parts", got=f"{len(got)} parts")
    expect([part.get("shapes") for part in got], [old[0]["shapes"]] * after, each="rank")
    labels = [{key: part.get(key) for key in ("rank", "world_size")} for part in got]
    wanted = [{"rank": rank, "world_size": after} for rank in range(after)]
    expect(labels, wanted, each="rank", likely={"labels": True})
    expect(list(got), expected, each="rank", likely=_mistakes(old, listed, expected))
    likely = {"input-changed": True}
    expect(handed, [old[rank] for rank in listed], each="part", likely=likely)


@resharding.requires("from two ranks to four, and from four to two")
def from_two_ranks_to_four(answer, draw):
    width = draw.integer(3, 6)
    shapes = {"up.weight": (4, width), "up.bias": (4,), "down.weight": (width, 4)}
    for before, after in ((2, 4), (4, 2)):
        _check(answer, before, after, _wholes(draw, shapes))


@resharding.requires("the parts come in any order", needs_earlier=True)
def the_parts_come_in_any_order(answer, draw):
    ranks = draw.integer(3, 5)
    _check(answer, ranks, ranks, _wholes(draw, {"w": (ranks, 6), "b": (4,)}), shuffled=True)


@resharding.requires(
    "from three ranks to four and to two, with sizes that do not divide",
    failures={"exception": "pieces"},
    needs_earlier=True,
)
def from_three_ranks_to_four_and_to_two(answer, draw):
    for before, after in ((3, 4), (3, 2), (4, 3)):
        _check(answer, before, after, _wholes(draw))


@resharding.requires(
    "to one rank, from one, and to more ranks than elements",
    failures={"IndexError": "pieces"},
    needs_earlier=True,
)
def to_one_rank(answer, draw):
    many = draw.integer(16, 19)  # more than elements of the smaller matrix
    for before, after in ((draw.integer(3, 5), 1), (1, draw.choice((3, 6))), (2, many), (many, 2)):
        _check(answer, before, after, _wholes(draw))


@resharding.requires(
    "a parameter without optimizer state; steps that are plain numbers",
    failures={
        "KeyError": "optimizer-left",
        "TypeError": "what-is-cut",
        "AttributeError": "what-is-cut",
    },
    needs_earlier=True,
)
def a_parameter_without_optimizer_state(answer, draw):
    before, after = draw.sample((2, 3, 4), 2)
    _check(answer, before, after, _wholes(draw, stateless=("up.weight", "up.bias")))
    parameters, states = _wholes(draw)
    numbers = {name: {**state, "step": int(state["step"])} for name, state in states.items()}
    _check(answer, before, after, (parameters, numbers))


@resharding.requires(
    "a parameter of three dimensions", failures={"exception": "what-is-cut"}, needs_earlier=True
)
def a_parameter_of_three_dimensions(answer, draw):
    before, after = draw.sample((2, 3, 4), 2)
    shapes = {"filter": (draw.integer(2, 3), 3, draw.integer(2, 5)), "bias": (3,)}
    _check(answer, before, after, _wholes(draw, shapes))


@resharding.requires("every new tensor has memory of its own", needs_earlier=True)
def every_new_tensor_has_memory_of_its_own(answer, draw):
    before, other = draw.sample((2, 3, 4), 2)
    for after in (other, before, 1):
        old = _checkpoint(*_wholes(draw), before)
        taken = storages(tensor for part in old for tensor in _tensors_of(part))
        for tensor in (tensor for part in answer(old, after) for tensor in _tensors_of(part)):
            if larger_than_itself(tensor):
                expected, got = "memory of exactly its size", "a part of a larger one"
                raise Wrong("memory", expected=expected, got=got)
            if storages([tensor]) & taken:
                got = f"one, of shape {tuple(tensor.shape)}, shared with another part or with `checkpoints`"
                raise Wrong("memory", expected="memory of its own for every tensor", got=got)
            taken |= storages([tensor])


@resharding.requires("what is not a whole checkpoint is refused with a ValueError")
def what_is_not_a_whole_checkpoint_is_refused(answer, draw):
    ranks = draw.integer(4, 6)
    last = ranks - 1
    wholes = _wholes(draw)
    parts, other = (_checkpoint(*wholes, n) for n in (ranks, last))
    gone, lost = draw.sample(range(1, last), 2)
    without = {rank: [p for p in parts if p["rank"] != rank] for rank in (gone, lost)}
    said = [_refusal(answer, without[rank], rank) for rank in (gone, lost)]
    if said[0] == said[1]:  # as one that lists all ranks there should be
        expected = f"another message without rank {gone} than without rank {lost}"
        raise Wrong("not-refused", expected=expected, got=said[0])
    _refusal(answer, parts[:last], last)
    _refusal(answer, [*parts[:last], parts[0]], last)
    for mixed in (
        [*parts, parts[gone]],
        [*other, parts[last]],
        [*parts[:gone], other[gone], *parts[gone + 1 :]],
        [],
    ):
        _refusal(answer, mixed, None)


def _refusal(answer, parts: list[dict], missing: int | None) -> str:
    """The message with which `parts` are refused, to two ranks as to as many as there are parts."""
    there = ", ".join(f"{part['rank']} of {part['world_size']}" for part in parts) or "none"
    expected = f"a ValueError for these ranks: {there}"
    for world_size in (len(parts) or 1, 2):
        got = "no exception"
        try:
            answer(copy.deepcopy(parts), world_size)
        except ValueError as error:
            said = str(error)
            continue
        except Exception as error:  # noqa: BLE001 - which one it is, is the question
            got = type(error).__name__
        raise Wrong("not-refused", expected=expected, got=got)
    if missing is not None and str(missing) not in re.findall(r"\d+", said):
        raise Wrong("not-refused", expected=f"a message that names rank {missing}", got=said)
    return said


@resharding.requires(
    "parameters in bfloat16, with an optimizer in float32",
    failures={"exception": "other-dtype"},
    needs_earlier=True,
)
def parameters_in_bfloat16(answer, draw):
    before, after = draw.sample((2, 3, 4), 2)
    _check(answer, before, after, _wholes(draw, dtype=torch.bfloat16))
