"""Exercise 8.5, `reshard`: what it asks for, and how it is checked."""

import copy
import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, same
from course_exercises.chapters.ch08.shared import drawn_tensor, larger_than_itself, shards_of

resharding = Exercise(
    "8.5",
    "reshard",
    points=3,
    minutes=40,
    kind="core",
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
        "list-order": "The shards are put together in the order of the list. Each part tells its `rank`: "
        "sort by it.",
        "sorted-as-text": "The parts are put together in the order of their ranks as text, where 10 comes "
        "before 2: compare numbers.",
        "padding-kept": "The old padding is still in there: it was cut along with the rest. The whole "
        "shape tells how many elements are real.",
        "vectors-cut": "Parameters with one dimension or none are the same on every rank: they are neither "
        "put together nor cut.",
        "whole-everywhere": "Every rank gets the whole parameter: cut it again.",
        "matrix-shape": "A shard is a vector: the matrix is laid flat before it is cut.",
        "uneven": "The new shards are not equal. Pad with zeros, until they are.",
        "padding-inside": "Every piece is padded by itself, so that zeros stand between the "
        "elements. Lay the whole end to end, pad once behind it, and cut.",
        "fewer-pieces": "Not every rank gets a shard: `chunk` makes fewer pieces where there are "
        "fewer elements than ranks. A rank that has no element has a shard of zeros.",
        "one-element": "A shard of one element is taken for a number. It has a dimension: ask "
        "`dim()`, not `numel()`.",
        "three-dimensions": "A parameter with more than two dimensions, such as a convolution's "
        "weight, is sharded as a matrix is.",
        "other-dtype": "A tensor has another dtype than before: `torch.zeros` makes float32. Take "
        "the dtype from what you cut, for each tensor by itself.",
        "multiples-only": "It works where one number of ranks divides the other. Put the whole together "
        "first; then any number will do.",
        "optimizer-left": "The optimizer's state is missing, or cut as before. Momentum has the shape of its "
        "shard: it is resharded as the parameter is. Without it training goes on, but not as before.",
        "step-cut": "Adam's `step` has no dimension: it is the same on every rank. It is a number, and "
        "nothing to cut or to put together.",
        "stateless": "A parameter without optimizer state, a frozen one for instance, is not in "
        "`optimizer`, neither before nor afterwards.",
        "rank-and-size": "`rank` and `world_size` of the new parts are those of the new run.",
        "missing-rank": "A part is missing, and you made a checkpoint of the rest. What is left of a "
        "half-written one must raise a ValueError.",
        "twice": "A rank is there twice, or from a run on another number of ranks, and you took it. Raise a "
        "ValueError.",
        "other-error": "An incomplete checkpoint ends in another exception than a ValueError.",
        "error-without-rank": "The ValueError does not say which rank is missing.",
        "a-view": "A new tensor is a view into the whole: a rank that saves it, saves the whole. `clone()` what "
        "you cut.",
        "shared": "A tensor is also one of another part, or of the old checkpoint: a step of one run would "
        "change the other. `clone()` what is not cut, too.",
        "input-changed": "The parts that were handed in have changed.",
    },
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


def _reshard_mistakes(old: list[dict], ranks: int, expected: list[dict], listed: list[int]) -> dict:
    """`listed` are the old ranks in the order of the list that was handed in."""
    shapes = old[0]["shapes"]
    matrices = [name for name, shape in shapes.items() if len(shape) > 1]

    def of_parameters(parts: list[dict], names: Iterable[str]) -> list:
        return [{name: part["parameters"][name] for name in names} for part in parts]

    def matrices_are(cut: Callable[[list[Tensor], torch.Size], list[Tensor]]) -> Callable:
        """Whether the matrices are what `cut` makes of the old shards, and wrong."""
        made = {name: cut([p["parameters"][name] for p in old], shapes[name]) for name in matrices}
        wanted = [{name: made[name][rank] for name in matrices} for rank in range(ranks)]
        if same(wanted, of_parameters(expected, matrices)):
            return lambda got: False
        return lambda got: same(of_parameters(got, matrices), wanted)

    def steps_differ(got: list[dict]) -> bool:
        steps = [
            [[s.get("step") for s in p["optimizer"].values()] for p in e] for e in (got, expected)
        ]
        return not same(*steps)

    def padded_one_by_one(shards: list[Tensor], shape: torch.Size) -> list[Tensor]:
        pieces = torch.cat(shards)[: shape.numel()].tensor_split(ranks)
        return [nn.functional.pad(piece, (0, len(pieces[0]) - len(piece))) for piece in pieces]

    def keeps_an_element(got: list[dict]) -> bool:
        single = [name for name in matrices if old[0]["parameters"][name].shape == (1,)]
        return same(
            of_parameters(got, single), [{n: old[0]["parameters"][n] for n in single}] * ranks
        )

    vectors = set(shapes) - set(matrices)
    return {
        "fewer-pieces": lambda got: any(set(p["parameters"]) < set(shapes) for p in got),
        "other-dtype": lambda got: any(
            len(own) == len(right) and own != right
            for own, right in zip(_dtypes(got), _dtypes(expected), strict=True)
        ),
        "list-order": matrices_are(
            lambda shards, shape: shards_of(
                torch.cat([shards[rank] for rank in listed])[: shape.numel()], ranks
            )
        ),
        "sorted-as-text": matrices_are(
            lambda shards, shape: shards_of(
                torch.cat([shards[rank] for rank in sorted(range(len(shards)), key=str)])[
                    : shape.numel()
                ],
                ranks,
            )
        ),
        "padding-kept": matrices_are(lambda shards, shape: shards_of(torch.cat(shards), ranks)),
        "padding-inside": matrices_are(padded_one_by_one),
        "one-element": lambda got: any(
            old[0]["parameters"][n].shape == (1,) and keeps_an_element(got) for n in matrices
        ),
        "three-dimensions": lambda got: any(
            len(shapes[name]) > 2 and not same(p["parameters"][name], right["parameters"][name])
            for name in matrices
            for p, right in zip(got, expected, strict=True)
        ),
        "whole-everywhere": lambda got: any(
            p["parameters"][name].shape == shapes[name] for p in got for name in matrices
        ),
        "matrix-shape": lambda got: any(
            p["parameters"][n].dim() > 1 for p in got for n in matrices
        ),
        "uneven": lambda got: any(
            len({p["parameters"][name].shape for p in got}) > 1 for name in matrices
        ),
        "vectors-cut": lambda got: (
            not same(of_parameters(got, vectors), of_parameters(expected, vectors))
        ),
        "stateless": lambda got: any(set(p["optimizer"]) > set(old[0]["optimizer"]) for p in got),
        "step-cut": lambda got: all(p["optimizer"] for p in got) and steps_differ(got),
        "optimizer-left": lambda got: same(
            of_parameters(got, shapes), of_parameters(expected, shapes)
        ),
    }


def _dtypes(parts: list[dict]) -> list[set]:
    return [{(i, tensor.dtype) for i, tensor in enumerate(_tensors_of(part))} for part in parts]


def _check_reshard(
    answer,
    draw,
    before: int,
    after: int,
    shapes=None,
    stateless=(),
    shuffled=False,
    number=False,
    dtype=torch.float32,
) -> list[dict]:
    parameters, states = _wholes(draw, shapes, stateless, dtype)
    if number:
        for state in states.values():
            state["step"] = int(state["step"])
    old, expected = (_checkpoint(parameters, states, ranks) for ranks in (before, after))
    listed = list(reversed(range(before))) if shuffled else list(range(before))
    handed = [copy.deepcopy(old[rank]) for rank in listed]
    got = answer(handed, after)
    expect_type(got, (list, tuple))
    if len(got) != after:
        raise Wrong(expected=f"{after} parts", got=f"{len(got)} parts")
    expect([part.get("shapes") for part in got], [old[0]["shapes"]] * after, each="rank")
    places = [{key: part.get(key) for key in ("rank", "world_size")} for part in got]
    wanted = [{"rank": rank, "world_size": after} for rank in range(after)]
    likely = {"rank-and-size": True}
    expect(places, wanted, each="rank", likely=likely)
    expect(list(got), expected, each="rank", likely=_reshard_mistakes(old, after, expected, listed))
    likely = {"input-changed": True}
    expect(handed, [old[rank] for rank in listed], each="part", likely=likely)
    return list(got)


@resharding.requires("from two ranks to four, and from four to two")
def from_two_ranks_to_four(answer, draw):
    width = draw.integer(3, 6)
    shapes = {"up.weight": (4, width), "up.bias": (4,), "down.weight": (width, 4)}
    _check_reshard(answer, draw, 2, 4, shapes)
    _check_reshard(answer, draw, 4, 2, shapes)


@resharding.requires("the parts come in any order", needs_earlier=True)
def the_parts_come_in_any_order(answer, draw):
    ranks = draw.integer(3, 5)
    _check_reshard(answer, draw, ranks, ranks, {"w": (ranks, 6), "b": (4,)}, shuffled=True)


@resharding.requires(
    "from three ranks to four and to two, with sizes that do not divide",
    failures={"exception": "multiples-only"},
    needs_earlier=True,
)
def from_three_ranks_to_four_and_to_two(answer, draw):
    for before, after in ((3, 4), (3, 2), (4, 3)):
        _check_reshard(answer, draw, before, after)


@resharding.requires(
    "to one rank, from one, and to more ranks than elements",
    failures={"IndexError": "fewer-pieces"},
    needs_earlier=True,
)
def to_one_rank(answer, draw):
    many = draw.integer(16, 19)  # more than elements of the smaller matrix
    for before, after in ((draw.integer(3, 5), 1), (1, draw.choice((3, 6))), (2, many), (many, 2)):
        _check_reshard(answer, draw, before, after)


@resharding.requires(
    "a parameter without optimizer state; steps that are plain numbers",
    failures={"KeyError": "stateless", "TypeError": "step-cut", "AttributeError": "step-cut"},
    needs_earlier=True,
)
def a_parameter_without_optimizer_state(answer, draw):
    before, after = draw.sample((2, 3, 4), 2)
    _check_reshard(answer, draw, before, after, stateless=("up.weight", "up.bias"))
    _check_reshard(answer, draw, before, after, number=True)


@resharding.requires(
    "a parameter of three dimensions",
    failures={"exception": "three-dimensions"},
    needs_earlier=True,
)
def a_parameter_of_three_dimensions(answer, draw):
    before, after = draw.sample((2, 3, 4), 2)
    shapes = {"filter": (draw.integer(2, 3), 3, draw.integer(2, 5)), "bias": (3,)}
    _check_reshard(answer, draw, before, after, shapes)


def _tensors_of(part: dict) -> Iterator[Tensor]:
    yield from part["parameters"].values()
    for state in part["optimizer"].values():
        yield from (value for value in state.values() if torch.is_tensor(value))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@resharding.requires("every new tensor has memory of its own", needs_earlier=True)
def every_new_tensor_has_memory_of_its_own(answer, draw):
    before, other = draw.sample((2, 3, 4), 2)
    for after in (other, before, 1):
        old = _checkpoint(*_wholes(draw), before)
        new = answer(old, after)
        taken = {_memory(tensor) for part in old for tensor in _tensors_of(part)}
        for tensor in (tensor for part in new for tensor in _tensors_of(part)):
            if larger_than_itself(tensor):
                raise Wrong(
                    "a-view", expected="memory of exactly its size", got="a part of a larger one"
                )
            if _memory(tensor) in taken:
                got = f"one, of shape {tuple(tensor.shape)}, shared with another part or with `checkpoints`"
                raise Wrong("shared", expected="memory of its own for every tensor", got=got)
            taken.add(_memory(tensor))


@resharding.requires("what is not a whole checkpoint is refused with a ValueError")
def what_is_not_a_whole_checkpoint_is_refused(answer, draw):
    ranks = draw.integer(4, 6)
    last = ranks - 1
    wholes = _wholes(draw)
    parts, other = (_checkpoint(*wholes, n) for n in (ranks, last))
    gone, lost = draw.sample(range(1, last), 2)
    without = {rank: [p for p in parts if p["rank"] != rank] for rank in (gone, lost)}
    said = [_refusal(answer, without[rank], "missing-rank", rank) for rank in (gone, lost)]
    if said[0] == said[1]:  # as one that lists all ranks there should be
        expected = f"another message without rank {gone} than without rank {lost}"
        raise Wrong("error-without-rank", expected=expected, got=said[0])
    _refusal(answer, parts[:last], "missing-rank", last)
    _refusal(answer, [*parts[:last], parts[0]], "twice", last)
    _refusal(answer, [*parts, parts[gone]], "twice", None)
    _refusal(answer, [*other, parts[last]], "twice", None)
    _refusal(answer, [*parts[:gone], other[gone], *parts[gone + 1 :]], "twice", None)
    _refusal(answer, [], "missing-rank", None)


@resharding.requires(
    "parameters in bfloat16, with an optimizer in float32",
    failures={"exception": "other-dtype"},
    needs_earlier=True,
)
def parameters_in_bfloat16(answer, draw):
    before, after = draw.sample((2, 3, 4), 2)
    _check_reshard(answer, draw, before, after, dtype=torch.bfloat16)


def _refusal(answer, parts: list[dict], slug: str, missing: int | None) -> str:
    """The message with which `parts` are refused, to two ranks as to as many as there are parts."""
    there = [part["rank"] for part in parts]
    expected = f"a ValueError, where the ranks {there} are there"
    for world_size in (len(parts) or 1, 2):
        try:
            answer(copy.deepcopy(parts), world_size)
        except ValueError as error:
            said = str(error)
        except Exception as error:  # noqa: BLE001 - which one it is, is the question
            raise Wrong("other-error", expected=expected, got=type(error).__name__) from None
        else:
            raise Wrong(slug, expected=expected, got="no exception")
    if missing is not None and str(missing) not in re.findall(r"\d+", said):
        expected = f"a message that names rank {missing}"
        raise Wrong("error-without-rank", expected=expected, got=said)
    return said
