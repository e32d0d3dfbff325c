"""Exercise 9.2, `ElasticSampler`: what it asks for, and how it is checked."""

import random
from dataclasses import dataclass, replace
from numbers import Integral

import numpy as np
import torch

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, run, same
from course_exercises.chapters.ch09.shared import through_file

sampler = Exercise(
    "9.2",
    "ElasticSampler",
    points=3,
    minutes=30,
    kind="core",
    parameters=("samples", "global_batch", "rank", "world_size", "seed"),
    hints=[
        (
            "Take the world size away: what would one rank do in each step? Which of its samples are "
            "yours when there are three?"
        ),
        (
            "Two numbers say where all ranks together are: the epoch, and how many samples of it have "
            "been used. Neither of them knows how many ranks there were."
        ),
        (
            "Draw a permutation of all samples from a generator of your own, seeded with seed and "
            "epoch. As long as samples are left, cut the next global batch off, move the position by "
            "its length, then yield every world-size-th of the piece, beginning at your rank."
        ),
    ],
    misconceptions={
        "not-once": "The steps of an epoch do not have each sample once. Each takes the next `global_batch` of the "
        "order, and the last what is left over: nothing is dropped or filled up, and no empty step comes after it.",
        "order": "Seed and epoch decide the order, both of them, and nothing else does: not the rank, the process, "
        "`hash` of a text or the global random state. Give them to a `torch.Generator` of your own, and not as a "
        "product, which is 0 where the seed is.",
        "global-random": "You change the process's global random state: dropout would get other "
        "numbers. Use a `torch.Generator` of your own.",
        "shares": "The ranks' lists of a step are together what one rank would take, whatever their number. Cut the "
        "order into steps of `global_batch` first, then each step between the ranks, the remainder too. Lengths "
        "differ by one at most, so a rank may get an empty list, which it yields as well.",
        "own-count": "What a rank counts for itself, its number and the world size have no place in the position and "
        "in the state. All ranks move on by the whole step, and a state says the same on each of them: the epoch, and "
        "how many of its samples all ranks together have used.",
        "position": "An iteration begins at the position and ends with the epoch. The position moves as a list is "
        "handed out: before the `yield`, so that a state saved in this step includes it, and not ahead of it. It "
        "stays at the end: there an epoch has no steps left.",
        "not-resumed": "After loading, the steps are those that the undisturbed run would have made: load the epoch "
        "and the position, both, and draw the order of this epoch as you did at first.",
        "set-epoch": "`set_epoch` goes to the beginning of another epoch, a later or an earlier one. In the epoch "
        "under way it changes nothing, also at its end: a resumed loop calls it with the epoch that it has loaded.",
        "state-moves": "A state that was handed out or loaded changes as the sampler goes on: it is the "
        "very dict in which the sampler counts. Hand out a copy, and take in the numbers.",
        "not-plain": "The state does not pass `torch.load(..., weights_only=True)`. Two numbers are "
        "enough.",
    },
    at_home=True,
)


@dataclass(frozen=True)
class _Order:
    """The arguments of a sampler, beside rank and world size."""

    samples: int
    global_batch: int
    seed: int

    def sizes(self) -> list[int]:
        """The samples of each step of an epoch."""
        starts = range(0, self.samples, self.global_batch)
        return [min(self.global_batch, self.samples - start) for start in starts]


def _order(draw, multiple_of: int = 1, rest: int = 1) -> _Order:
    """An order of six steps, the last of them with `rest` samples."""
    batch = multiple_of * (draw.integer(6, 8) if multiple_of == 1 else 1)
    return _Order(5 * batch + rest, batch, draw.integer(1, 999))


def _samplers(answer, order: _Order, world_size: int, epoch: int = 0) -> list:
    """The samplers of all ranks, at the beginning of an epoch."""
    made = [
        answer(order.samples, order.global_batch, rank, world_size, order.seed)
        for rank in range(world_size)
    ]
    for sampler in made if epoch else []:
        sampler.set_epoch(epoch)
    return made


def _loaded_into(samplers: list, state: dict) -> list:
    """The samplers, each after it has loaded what a file holds of `state`."""
    for sampler in samplers:
        sampler.load_state_dict(through_file(state))
    return samplers


def _steps(samplers: list, draw, count: int | None = None) -> tuple[list, list]:
    """The lists of all ranks in each of the next `count` steps, [step][rank], and the state that
    each rank would save at the end of the last of them. Every rank has its own random numbers."""
    lists, states = [], []
    for sampler in samplers:
        torch.manual_seed(draw.seed())
        random.seed(draw.seed())
        np.random.seed(draw.seed())
        lists.append([])
        expect_type(sampler, torch.utils.data.Sampler)
        for batch in sampler:
            lists[-1].append(_indices(batch))
            if len(lists[-1]) == count:
                states.append(sampler.state_dict())
                break
            if len(lists[-1]) > 1000:
                slug = "own-count" if len(samplers) > 1 else "position"
                raise Wrong(slug, expected="an end of the epoch", got="a thousand steps")
        else:
            states.append(sampler.state_dict())
    counts = [len(own) for own in lists]
    if len(set(counts)) > 1:
        slug = "own-count" if _twice(_flat(_flat(lists))) else "shares"
        raise Wrong(slug, expected="as many steps on each rank", got=counts)
    return [list(step) for step in zip(*lists, strict=True)], states


def _indices(batch) -> list[int]:
    """A list that a sampler yields, raises Wrong where it is none. NumPy's integers count."""
    expected = "a list of ints for each step, as a batch sampler yields it"
    if not isinstance(batch, (list, tuple)):
        raise Wrong(expected=expected, got=batch)
    other = next((index for index in batch if not isinstance(index, Integral)), None)
    if other is not None:
        raise Wrong(expected=expected, got=f"a list with a {type(other).__name__}")
    return [int(index) for index in batch]


def _together(steps: list) -> list[list[int]]:
    """The samples of each step, of all ranks together, in ascending order."""
    return [sorted(_flat(step)) for step in steps]


def _twice(indices: list) -> bool:
    return len(set(indices)) < len(indices)


def _flat(lists: list[list]) -> list:
    return [entry for each in lists for entry in each]


def _rest(samplers: list, draw) -> list[list[int]]:
    """The samples of each step that is left in the epoch."""
    return _together(_steps(samplers, draw)[0])


def _whole_epoch(answer, order: _Order, draw, epoch: int = 0) -> list[list[int]]:
    """The same, for one rank that nothing disturbs."""
    return _rest(_samplers(answer, order, 1, epoch), draw)


@sampler.requires("one rank gets every sample once, in steps of the global batch")
def one_rank_gets_every_sample_once(answer, draw):
    order = _order(draw, rest=draw.integer(2, 5))
    for epoch in (0, draw.integer(1, 9)):
        steps, _ = _steps(_samplers(answer, order, 1, epoch), draw)
        got = [len(step[0]) for step in steps]
        mistakes = {"set-epoch": epoch > 0 and sum(got) < order.samples, "not-once": True}
        expect(got, order.sizes(), what=f"samples of each step, epoch {epoch}", likely=mistakes)
        samples = _flat(_together(steps))
        what, likely = f"all samples of epoch {epoch}", {"not-once": True}
        expect(sorted(samples), list(range(order.samples)), what=what, likely=likely)
    if _flat([step[0] for step in steps]) == list(range(order.samples)):
        raise Wrong("order", expected="an order drawn from the seed", got="0, 1, 2, ...")
    even = _order(draw, rest=0)
    got = [len(step) for step in _whole_epoch(answer, even, draw)]
    what = "samples of each step, where batches divide them"
    expect(got, even.sizes(), what=what, likely={"not-once": True})


@sampler.requires("any number of ranks makes the same steps, shared out evenly", needs_earlier=True)
def any_number_of_ranks_makes_the_same_steps(answer, draw):
    divides, remainder = draw.sample((2, 3, 4), 2), draw.choice(((3, 10), (4, 10), (5, 12)))
    more_than_samples = draw.choice(((5, 3), (6, 4)))
    pairs = [*((world_size, 12) for world_size in divides), remainder, more_than_samples]
    for world_size, batch in pairs:
        order = _order(draw, multiple_of=batch, rest=world_size - 1)
        _check_shares(answer, order, world_size, draw)


def _check_shares(answer, order: _Order, world_size: int, draw) -> None:
    alone = _whole_epoch(answer, order, draw)
    steps, _ = _steps(_samplers(answer, order, world_size), draw)
    got = _together(steps)
    sizes = [len(step) for step in got]
    mistakes = {
        "order": sizes == order.sizes() and _twice(_flat(got[:-1])),
        "own-count": len(got) > len(alone),
        "shares": True,
    }
    expect(got, alone, each="step", what=f"world size {world_size}", likely=mistakes)
    for step in steps:
        lengths = [len(own) for own in step]
        if max(lengths) - min(lengths) > 1:
            raise Wrong("shares", expected="lengths that differ by at most one", got=lengths)


@sampler.requires("seed and epoch decide the order, and nothing else", needs_earlier=True)
def seed_and_epoch_decide_the_order(answer, draw):
    order = _order(draw)
    first = _whole_epoch(answer, order, draw)
    again = _whole_epoch(answer, order, draw)
    [elsewhere] = run(_in_another_process, 1, answer, order)
    for got, where in ((again, ""), (elsewhere, ", in another process")):
        what = f"the same epoch of the same seed{where}"
        expect(got, first, each="step", what=what, likely={"order": True})
    zero = replace(order, seed=0)
    for one, other, what in (
        ((order, 0), (order, 1), "epochs 0 and 1"),
        ((order, 0), (replace(order, seed=order.seed + 1000), 0), "two seeds"),
        ((zero, 0), (zero, 1), "epochs 0 and 1 of seed 0"),
    ):
        orders = [_whole_epoch(answer, order, draw, epoch) for order, epoch in (one, other)]
        if orders[0] == orders[1]:
            raise Wrong("order", expected=f"different orders in {what}", got="the same")


def _in_another_process(rank, answer, order: _Order) -> list[list[int]]:
    [alone] = _samplers(answer, order, 1)
    return [sorted(batch) for batch in alone]


@sampler.requires("the global random states are left alone", needs_earlier=True)
def the_global_random_states_are_left_alone(answer, draw):
    before = _global_random_states()

    def check_random_states(when: str) -> None:
        if not same(_global_random_states(), before):
            got = f"others {when}"
            raise Wrong("global-random", expected="the random states as before", got=got)

    [alone] = _samplers(answer, _order(draw), 1, epoch=2)
    check_random_states("after set_epoch")
    state = alone.state_dict()
    for _ in alone:
        check_random_states("within a step")
    check_random_states("after the last step")
    alone.load_state_dict(state)
    check_random_states("after load_state_dict")


def _global_random_states() -> list:
    return [torch.get_rng_state(), list(random.getstate()[1]), np.random.get_state()[1].tolist()]


@sampler.requires(
    "a resumed epoch goes on where it was, and the next one is whole", needs_earlier=True
)
def a_resumed_epoch_goes_on_where_it_was(answer, draw):
    order, epoch, done = _order(draw), draw.integer(2, 5), draw.integer(2, 3)
    whole = _whole_epoch(answer, order, draw, epoch)
    following = _whole_epoch(answer, order, draw, epoch + 1)

    beside = whole[done - 1 :], whole[done + 1 :]

    def expect_rest(samplers, expected, what, slug) -> None:
        likely = {"position": lambda got: got in beside, slug: True}
        expect(_rest(samplers, draw), expected, each="step", what=what, likely=likely)

    def resumed(state) -> list:
        return _loaded_into(_samplers(answer, order, 1), state)

    began, other = _samplers(answer, order, 1, epoch), _samplers(answer, order, 1)
    state = through_file(_steps(began, draw, done)[1][0])  # as it is now
    expect_rest(began, whole[done:], f"iterating again after {done} steps", "position")
    expect_rest(began, [], "iterating again after the last step", "position")
    loaded = f"after loading epoch {epoch} with {done} steps made"
    expect_rest(resumed(state), whole[done:], loaded, "not-resumed")
    _rest(other, draw)
    what = f"{loaded}, in a sampler that has made epoch 0"
    expect_rest(_loaded_into(other, state), whole[done:], what, "not-resumed")
    again = resumed(state)
    for number, expected in ((epoch, whole[done:]), (epoch + 1, following), (epoch, whole)):
        again[0].set_epoch(number)
        expect_rest(again, expected, f"{loaded}, and then set_epoch({number})", "set-epoch")
    ended = began[0].state_dict()
    loaded = f"after loading the end of epoch {epoch}"
    expect_rest(resumed(ended), [], loaded, "position")
    again = resumed(ended)
    again[0].set_epoch(epoch)
    expect_rest(again, [], f"{loaded} and set_epoch({epoch})", "set-epoch")
    _check_states_stay(answer, order, draw)


def _check_states_stay(answer, order: _Order, draw) -> None:
    """Raises Wrong where a state changes as the sampler that gave it, or took it, goes on."""
    gave, took = _samplers(answer, order, 1), _samplers(answer, order, 1)
    _, [state] = _steps(gave, draw, 1)
    saved = through_file(state)
    _steps(gave, draw, 1)
    took[0].load_state_dict(state)
    _steps(took, draw, 1)
    expect(state, saved, what="the state, two steps later", likely={"state-moves": True})


@sampler.requires("resumed on other numbers of ranks, every sample comes once", needs_earlier=True)
def resumed_on_other_numbers_of_ranks(answer, draw):
    for batch in (12, 7, 3):
        sizes = draw.sample((1, 2, 3, 4 if batch > 3 else 5), 4)
        order, epoch = _order(draw, multiple_of=batch, rest=2), draw.integer(1, 5)
        whole = _whole_epoch(answer, order, draw, epoch)
        samplers = _samplers(answer, order, sizes[0], epoch)
        for done, next_size in enumerate([*sizes[1:], None]):
            # the last of them makes all steps that are left
            steps, states = _steps(samplers, draw, 1 if next_size else None)
            expected = whole[done : done + 1] if next_size else whole[done:]
            what, likely = f"world size {len(samplers)}, resumption {done}", {"own-count": True}
            expect(_together(steps), expected, each="step", what=what, likely=likely)
            if any(not same(state, states[0]) for state in states):
                raise Wrong("own-count", expected="the same state on each rank", got=states)
            if next_size:
                samplers = _samplers(answer, order, next_size)
                samplers = _loaded_into(samplers, draw.choice(states))
    _, [alone] = _steps(_samplers(answer, order, 1), draw, 2)
    _, [other, *_] = _steps(_samplers(answer, order, draw.choice((2, 3))), draw, 2)
    what = "the state of several ranks after two steps"
    expect(other, alone, what=what, likely={"own-count": True})
