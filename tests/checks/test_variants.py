"""Proves that a seed makes a variant of every check: other sizes and, where ranks or a number of
workers play a role, other world sizes, so that two classes need not share answers.

The solutions run through their checks under a few seeds, while this module notes what the checks
draw and on how many ranks they run. A requirement is left where it would start its first ranks,
so that all takes seconds: let a check draw before that, and begin with the world size drawn.
"""

import contextlib
import functools
import inspect

import pytest

from course_exercises.authoring import framework, load_answer
from course_exercises.authoring.draw import Draw
from course_exercises.authoring.guard import undisturbed
from course_exercises.checks.catalogue import find, modules

SEEDS = ("autumn", "spring", "summer")

# What says how many workers there are, where a check hands it to the answer in the kernel. All
# other exercises run on ranks.
WORKERS = {
    "1.1": lambda given: given["lines"],
    "1.2": lambda given: len(given["minutes"]),
    "1.3": lambda given: given["job"].gpus,
    "2.1": lambda given: len(given["devices"]),
    "2.2": lambda given: len(given["devices"]),
    "2.3": lambda given: len(given["outputs"]),
    "2.4": lambda given: len(given["devices"]),
    "2.5": lambda given: given["machine"].driver_gpus,
    "3.3": lambda given: given["world_size"],
    "4.3": lambda given: given["stages"],
    "4.5": lambda given: given["stages"],
    "5.1": lambda given: given["stages"],
    "5.2": lambda given: given["stages"],
    "5.3": lambda given: given["stages"],
    "5.4": lambda given: given["stages"],
    "5.7": lambda given: given["ranks"],
    "7.1": lambda given: tuple(given["sizes"].values()),
    "7.2": lambda given: (given["dp"], given["pp"], given["tp"]),
    "7.5": lambda given: (*given["sizes"].values(), given["per_machine"]),
    "8.1": lambda given: given["world_size"],
    "8.3": lambda given: given["world_size"],
    "8.5": lambda given: (len(given["checkpoints"]), given["world_size"]),
    "9.2": lambda given: given["world_size"],
    "9.4": lambda given: given["nodes"],
    "9.5": lambda given: (given["available"], given["fits"], given["useful"]),
    "9.7": lambda given: len(given["parts"]),
    "10.2": lambda given: given["ranks"],
    "10.6": lambda given: given["mesh"],
    "12.1": lambda given: given["layout"].gpus,
    "12.2": lambda given: given["layout"].gpus,
    "12.3": lambda given: given["layout"].gpus,
    "12.4": lambda given: given["gpus"],
    "13.3": lambda given: given["gpus"],
}
NO_WORLD_SIZE = {
    "0.2": "a tensor has no ranks",
    "3.8": "the profile of one rank",
    "4.1": "its task is to cut into three",
    "4.2": "its task is a cut between two ranks",
    "4.4": "the network to repair has two parts",
    "5.5": "micro-batches of one process",
    "9.3": "the state of one process",
    "10.1": "two partial results of one process",
    "11.1": "a token is routed by itself",
}


class StopHere(BaseException):
    """Ends a requirement; no `except Exception` of a check catches it."""


class NotingDraw(Draw):
    """Draws as Draw does and keeps what may become a size: integers, choices and shapes."""

    def __init__(self, seed, label, notes):
        super().__init__(seed, label)
        self._notes = notes

    def integer(self, low, high):
        return self._noted(super().integer(low, high))

    def choice(self, options):
        return options[self._noted(super().choice(range(len(options))))]

    def sample(self, options, count):
        return [options[i] for i in self._noted(super().sample(range(len(options)), count))]

    def tensor(self, *shape, **kwargs):
        return super().tensor(*self._noted(shape), **kwargs)

    def integers(self, *shape, **kwargs):
        return super().integers(*self._noted(shape), **kwargs)

    def _noted(self, value):
        self._notes.append(value)
        return value


def variant(exercise, seed, monkeypatch):
    """What the check draws with this seed, and the world sizes that it runs."""
    drawn, world_sizes = [], []

    def launch(fn, nprocs, *args, **kwargs):
        world_sizes.append(nprocs)
        raise StopHere

    monkeypatch.setattr(framework, "launch", launch)
    answer = load_answer(exercise.id)
    if exercise.id in WORKERS:
        answer = noting_calls(answer, WORKERS[exercise.id], world_sizes)
    for index, rule in enumerate(exercise.rules):
        draw = NotingDraw(seed, f"{exercise.id}/{index}", drawn)
        with undisturbed(), contextlib.suppress(StopHere):
            rule.function(answer, draw)
    return drawn, world_sizes


def noting_calls(answer, workers, notes):
    """The same answer, which notes for how many workers it is called."""
    called = answer.__init__ if isinstance(answer, type) else answer

    @functools.wraps(called)
    def noting(*args, **kwargs):
        bound = inspect.signature(called).bind(*args, **kwargs)
        notes.append(workers(bound.arguments))
        return called(*args, **kwargs)

    if not isinstance(answer, type):
        return noting
    answer.__init__ = noting
    return answer


@pytest.mark.parametrize("exercise_id", modules(), ids=lambda id: id.replace(".", "_"))
def test_a_seed_makes_a_variant(exercise_id, monkeypatch):
    exercise = find(exercise_id)
    sizes, world_sizes = zip(*(variant(exercise, seed, monkeypatch) for seed in SEEDS))
    same = []
    if different(sizes) < len(SEEDS):
        same.append(f"sizes: {sizes}")
    if different(world_sizes) == 1 and exercise.id not in NO_WORLD_SIZE:
        same.append(f"world sizes: {world_sizes}")
    assert not same, f"with {SEEDS} the check has the same {' and '.join(same)}"


def different(variants):
    return len({str(each) for each in variants})


def test_the_tables_fit_the_exercises():
    assert not set(WORKERS) & set(NO_WORLD_SIZE)
    assert set(WORKERS) | set(NO_WORLD_SIZE) <= set(modules())
