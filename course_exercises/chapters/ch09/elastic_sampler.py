"""Exercise 9.2, `ElasticSampler`: what it asks for, and how it is checked."""

import random
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, run, same
from course_exercises.chapters.ch09.shared import through_file


@dataclass(frozen=True)
class _Order:
    """The arguments of a sampler, beside rank and world size."""

    samples: int
    global_batch: int
    seed: int

    def sizes(self) -> list[int]:
        """The samples of each step of an epoch."""
        return [
            min(self.global_batch, self.samples - i)
            for i in range(0, self.samples, self.global_batch)
        ]


def _samplers(answer, order: _Order, world_size: int, epoch: int = 0) -> list:
    """The samplers of all ranks, at the beginning of an epoch."""
    made = [
        answer(order.samples, order.global_batch, rank, world_size, order.seed)
        for rank in range(world_size)
    ]
    for sampler in made if epoch else []:
        sampler.set_epoch(epoch)
    return made


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
        for batch in sampler if count != 0 else []:
            expect_type(batch, (list, tuple), likely="not-lists")
            for index in batch:
                if not isinstance(index, Integral):  # NumPy's are
                    got = f"a list with a {type(index).__name__}"
                    raise Wrong("not-lists", expected="a list of ints", got=got)
            lists[-1].append([int(index) for index in batch])
            if len(lists[-1]) == count:
                states.append(sampler.state_dict())
                break
            if len(lists[-1]) > 1000:
                raise Wrong("never-ends", expected="an end of the epoch", got="a thousand steps")
        else:
            states.append(sampler.state_dict())
    if len({len(own) for own in lists}) > 1:
        counts = [len(own) for own in lists]
        raise Wrong("steps-differ", expected="as many steps on each rank", got=counts)
    return [list(step) for step in zip(*lists, strict=True)], states


def _together(steps: list) -> list[list[int]]:
    """The samples of each step, of all ranks together, in ascending order."""
    return [sorted(index for own in step for index in own) for step in steps]


def _twice(indices: list) -> bool:
    return len(set(indices)) < len(indices)


def _flat(steps: list[list[int]]) -> list[int]:
    return [index for step in steps for index in step]


def _whole_epoch(answer, order: _Order, draw, epoch: int = 0) -> list[list[int]]:
    """The samples of each step, of one rank that nothing disturbs."""
    return _together(_steps(_samplers(answer, order, 1, epoch), draw)[0])


def _order(draw, multiple_of: int = 1, rest: int = 1) -> _Order:
    """An order of six steps, the last of them with `rest` samples."""
    batch = multiple_of * (draw.integer(6, 8) if multiple_of == 1 else 1)
    return _Order(5 * batch + rest, batch, draw.integer(1, 999))


def _loaded_into(samplers: list, state: dict) -> list:
    """The samplers, each after it has loaded what a file holds of `state`."""
    for sampler in samplers:
        sampler.load_state_dict(through_file(state))
    return samplers


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
        "not-lists": "Each step yields one list of integers, neither a single index nor a tensor: this "
        "is a batch sampler.",
        "never-ends": "The iteration does not end with the epoch.",
        "not-shuffled": "The samples come in the order of their numbers.",
        "drops-last": "The rest that fills no whole batch is dropped: those samples are never seen "
        "in this epoch.",
        "empty-step": "Where the last batch is full, one more step comes after it, with nothing in it. The "
        "number of steps is a quotient rounded up, which is not the quotient plus one.",
        "padded": "Samples come twice to make all lists equally long. The lists may differ by one.",
        "starts-late": "After `set_epoch` an epoch lacks its first samples: go back to position 0.",
        "own-order": "The ranks draw different orders, so they take the same samples in one step. "
        "Neither the rank nor the process's own random numbers may have a say in it.",
        "global-batch-changes": "With more ranks a step has more samples. `global_batch` is what all "
        "ranks take together.",
        "remainder-lost": "Where the ranks do not divide the global batch, you leave the remainder "
        "out of every step.",
        "batches-differ": "The samples of a step depend on the number of ranks. Cut the order into "
        "steps first, then each step between the ranks.",
        "uneven": "Lengths differ by more than one: a share rounded down leaves one rank the whole "
        "remainder, a share rounded up leaves the last ranks little or nothing.",
        "steps-differ": "The ranks do not make the same number of steps, and a collective of one "
        "would wait for ever. A rank with nothing to do yields an empty list.",
        "same-order": "Every epoch has the same order. `set_epoch` has to reach the random numbers.",
        "seed-zero": "With seed 0, the default, every epoch has the same order: whatever you multiply it "
        "with, it stays 0. Let the epoch in by another way.",
        "per-process": "In another process the same seed and epoch give another order, and ranks are "
        "processes, as is a resumed run. `hash` of a text, the time and a process's number must have no "
        "say in it.",
        "seed-ignored": "Another seed gives the same order.",
        "global-random": "You change the process's global random state: dropout would get other "
        "numbers. Use a `torch.Generator` of your own.",
        "not-plain": "The state does not pass `torch.load(..., weights_only=True)`. Two numbers are "
        "enough.",
        "from-zero": "After loading, the epoch starts from its beginning: what was used is used again.",
        "epoch-lost": "The position comes back, the epoch does not: the rest is that of another "
        "order, in which some samples come again and others never.",
        "one-behind": "A state that is saved within a step does not include that step: its samples "
        "come a second time. Move the position before you yield.",
        "one-ahead": "The state says that steps were made that nobody has seen: their samples are "
        "never used. Move the position as the lists are handed out.",
        "reshuffles": "The rest of the epoch is drawn anew after loading. No sample is lost, but the "
        "steps are others than in a run that nothing disturbed.",
        "end-forgotten": "A state that is saved at the end of an epoch says that the epoch is still to "
        "come, and a resumed run makes it a second time. `set_epoch` goes back to the start, the end "
        "of the iteration does not.",
        "set-epoch-resets": "A resumed loop calls `set_epoch` with the epoch that it has just loaded, "
        "and your position is gone. In the epoch under way it changes nothing.",
        "ended-begins-again": "The epoch has ended, and `set_epoch` with its number begins it a second time. A "
        "run that resumes there makes all its steps again: only another epoch goes to a beginning.",
        "iterates-from-start": "An epoch that was left in the middle begins anew when somebody iterates "
        "again: what was used is used again. Yield the steps that are left, after the last none.",
        "order-kept": "The samples are those of the epoch before `load_state_dict`: you keep its order. "
        "Loading may bring another epoch, and with it another order.",
        "position-kept": "A new epoch begins in the middle: `set_epoch` has to go back to the start.",
        "never-goes-back": "`set_epoch` does nothing for an epoch before the one under way. A run that makes an "
        "epoch again goes to its beginning, too.",
        "position-per-rank": "The position counts the samples of one rank. It means another place as "
        "soon as there are more ranks or fewer: count those of all ranks together.",
        "restores-rank": "After loading, ranks have the same rank, or the old world size: the state "
        "brings them along. They belong to the process, not to the run.",
        "states-differ": "The ranks' states differ, so it matters which of them is saved.",
        "world-size-in-state": "The state is another one with another number of ranks. It says where "
        "all of them are together, which is the same for any world size: leave theirs out.",
        "state-moves": "A state that was handed out or loaded changes as the sampler goes on: it is the "
        "very dict in which the sampler counts. Hand out a copy, and take in the numbers.",
    },
    at_home=True,
)


@sampler.requires("one rank gets every sample once, in steps of the global batch")
def one_rank_gets_every_sample_once(answer, draw):
    order = _order(draw, rest=draw.integer(2, 5))
    for epoch in (0, draw.integer(1, 9)):
        steps, _ = _steps(_samplers(answer, order, 1, epoch), draw)
        got = [len(step[0]) for step in steps]
        full = order.sizes()[:-1]
        mistakes = {
            "drops-last": got == full,
            "padded": got == [*full, order.global_batch],
            "starts-late": epoch > 0 and sum(got) < order.samples,
        }
        expect(got, order.sizes(), what=f"samples of each step, epoch {epoch}", likely=mistakes)
        flat = _flat(_together(steps))
        expect(sorted(flat), list(range(order.samples)), what=f"all samples of epoch {epoch}")
    even = _order(draw, rest=0)
    got = [len(step) for step in _whole_epoch(answer, even, draw)]
    likely = {"empty-step": got == [*even.sizes(), 0]}
    expect(got, even.sizes(), what="samples of each step, where batches divide them", likely=likely)
    if _flat([step[0] for step in steps]) == list(range(order.samples)):
        raise Wrong("not-shuffled", expected="an order drawn from the seed", got="0, 1, 2, ...")


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
    share, remainder = divmod(order.global_batch, world_size)
    mistakes = {
        "own-order": [len(step) for step in got] == order.sizes() and _twice(_flat(got[:-1])),
        "global-batch-changes": len(got[0]) >= 2 * order.global_batch - 1,
        "remainder-lost": remainder and len(got[0]) == share * world_size,
        "padded": _twice(_flat(got)),
        "drops-last": len(got) == len(alone) - 1,
        "batches-differ": True,
    }
    expect(got, alone, each="step", what=f"with {world_size} ranks", likely=mistakes)
    for step in steps:
        lengths = [len(own) for own in step]
        if max(lengths) - min(lengths) > 1:
            raise Wrong("uneven", expected="lengths that differ by at most one", got=lengths)


@sampler.requires("seed and epoch decide the order, and nothing else", needs_earlier=True)
def seed_and_epoch_decide_the_order(answer, draw):
    order = _order(draw)
    first = _whole_epoch(answer, order, draw)
    expect(_whole_epoch(answer, order, draw), first, what="the same epoch of the same seed")
    if _whole_epoch(answer, order, draw, epoch=1) == first:
        raise Wrong("same-order", expected="another order in epoch 1", got="that of epoch 0")
    other = _Order(order.samples, order.global_batch, order.seed + 1000)
    if _whole_epoch(answer, other, draw) == first:
        raise Wrong("seed-ignored", expected="another order for another seed", got="the same")
    zero = _Order(order.samples, order.global_batch, 0)
    if _whole_epoch(answer, zero, draw) == _whole_epoch(answer, zero, draw, epoch=1):
        raise Wrong(
            "seed-zero", expected="another order in epoch 1 of seed 0", got="that of epoch 0"
        )
    [elsewhere] = run(_in_another_process, 1, answer, order)
    likely = {"per-process": True}
    expect(elsewhere, first, each="step", what="in another process", likely=likely)


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
    _, [state] = _steps(_samplers(answer, order, 1, epoch), draw, done)
    other_rest = _flat(_whole_epoch(answer, order, draw)[done:])
    mistakes = {
        "from-zero": lambda got: got in (whole, _whole_epoch(answer, order, draw)),
        "one-behind": lambda got: got == whole[done - 1 :],
        "one-ahead": lambda got: got == whole[len(whole) - len(got) :],
        "reshuffles": lambda got: sorted(_flat(got)) == sorted(_flat(whole[done:])),
        "epoch-lost": lambda got: sorted(_flat(got)) == sorted(other_rest),
    }
    resumed = _loaded_into(_samplers(answer, order, 1), state)
    got = _together(_steps(resumed, draw)[0])
    expect(got, whole[done:], each="step", what="after loading", likely=mistakes)
    resumed = _loaded_into(_samplers(answer, order, 1), state)
    resumed[0].set_epoch(epoch)
    got = _together(_steps(resumed, draw)[0])
    likely = {"set-epoch-resets": True}
    what = f"after loading and set_epoch({epoch})"
    expect(got, whole[done:], each="step", what=what, likely=likely)
    resumed[0].set_epoch(epoch + 1)
    got = _together(_steps(resumed, draw)[0])
    likely = {"position-kept": lambda got: len(got) < len(whole)}
    following = _whole_epoch(answer, order, draw, epoch + 1)
    expect(got, following, each="step", what="the next epoch", likely=likely)
    resumed[0].set_epoch(epoch)
    got = _together(_steps(resumed, draw)[0])
    likely = {"never-goes-back": True}
    expect(got, whole, each="step", what=f"after set_epoch({epoch}), once more", likely=likely)
    _, [state] = _steps(_samplers(answer, order, 1, epoch), draw)
    resumed = _loaded_into(_samplers(answer, order, 1), state)
    got = _together(_steps(resumed, draw)[0])
    if got == whole:
        expected = "no step that was made before"
        raise Wrong("end-forgotten", expected=expected, got=f"all of epoch {epoch} once more")
    resumed = _loaded_into(_samplers(answer, order, 1), state)
    resumed[0].set_epoch(epoch)
    got = _together(_steps(resumed, draw)[0])
    likely = {"ended-begins-again": True}
    expect(
        got, [], what=f"steps after the end of epoch {epoch} and set_epoch({epoch})", likely=likely
    )
    _check_states_stay(answer, order, draw)
    _check_iterates_again(answer, order, draw)


def _check_iterates_again(answer, order: _Order, draw) -> None:
    """Iterates twice over an epoch, the second time after a break, and then over another that was
    loaded."""
    whole, samplers = _whole_epoch(answer, order, draw), _samplers(answer, order, 1)
    _steps(samplers, draw, 2)
    likely = {"iterates-from-start": True}
    for expected, what in (
        (whole[2:], "iterating again after two steps"),
        ([], "after the last step"),
    ):
        got = _together(_steps(samplers, draw)[0])
        expect(got, expected, each="step", what=what, likely=likely)
    _, [state] = _steps(_samplers(answer, order, 1, epoch=3), draw, 2)
    got = _together(_steps(_loaded_into(samplers, state), draw)[0])
    expected = _whole_epoch(answer, order, draw, epoch=3)[2:]
    what, likely = "epoch 3, loaded after epoch 0", {"order-kept": whole[2:]}
    expect(got, expected, each="step", what=what, likely=likely)


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
        samplers, states = _samplers(answer, order, sizes[0], epoch), []
        for done, next_size in enumerate([*sizes[1:], None]):
            # the last of them makes all steps that are left
            steps, next_states = _steps(samplers, draw, 1 if next_size else None)
            expected = whole[done : done + 1] if next_size else whole[done:]
            what = f"with {len(samplers)} ranks, resumed {done} times"
            _expect_steps_together(steps, expected, what)
            if any(not same(state, states[0]) for state in states):
                raise Wrong("states-differ", expected="the same state on each rank", got=states)
            states = next_states
            if next_size:
                samplers = _samplers(answer, order, next_size)
                samplers = _loaded_into(samplers, draw.choice(states))
    _, [alone] = _steps(_samplers(answer, order, 1), draw, 2)
    _, [other, *_] = _steps(_samplers(answer, order, draw.choice((2, 3))), draw, 2)
    expect(other, alone, what="the state after two steps", likely={"world-size-in-state": True})


def _expect_steps_together(steps: list, expected: list, what: str) -> None:
    """Compares what the ranks take together after a change of their number."""
    got = _together(steps)
    pairs = list(zip(got, expected, strict=False))
    mistakes = {
        # ranks that take the same, or parts that are nobody's
        "restores-rank": any(_twice(own) or set(own) < set(whole) for own, whole in pairs),
        "position-per-rank": True,
    }
    expect(got, expected, each="step", what=what, likely=mistakes)
