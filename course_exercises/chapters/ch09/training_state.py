"""Exercise 9.3, `TrainingState`: what it asks for, and how it is checked."""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, run
from course_exercises.chapters.ch09.shared import Raised, through_file
from course_utils.hardware import device


class _Cursor:
    """A sampler whose `load_state_dict` draws random numbers, as one that shuffles again would."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def next(self) -> int:
        self.position += 1
        return self.position

    def state_dict(self) -> dict:
        return {"position": self.position}

    def load_state_dict(self, state: dict) -> None:
        torch.randperm(5)
        self.position = state["position"]


@dataclass(frozen=True)
class _Job:
    """All parts of a training, and the data that it looks at."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    sampler: _Cursor
    data: torch.Tensor

    def parts(self) -> tuple:
        return self.model, self.optimizer, self.scheduler, self.sampler

    def step(self) -> float:
        """One step with random numbers of all three generators; returns the loss."""
        x = self.data.roll(self.sampler.next(), 0)
        x = x + torch.from_numpy(np.random.normal(0, 0.1, x.shape)).float() + random.gauss(0, 0.1)
        loss = self.model(x.to(next(self.model.parameters()).device)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()


def _data(draw) -> torch.Tensor:
    return draw.tensor(draw.integer(6, 9), draw.integer(3, 6))


def _job(seed: int, data: torch.Tensor) -> _Job:
    """A model with buffers, dropout and a frozen parameter; an optimizer with two groups."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = nn.Sequential(
        nn.Linear(data.shape[1], 6),
        nn.BatchNorm1d(6),
        nn.Dropout(0.3),
        nn.Linear(6, 6),
        nn.Linear(6, 2),
    )
    model[3].weight.requires_grad_(False)
    groups = [{"params": list(model[:2].parameters()), "lr": 0.05}]
    groups += [{"params": [p for p in model[2:].parameters() if p.requires_grad]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    return _Job(model, optimizer, scheduler, _Cursor(), data)


def _next_numbers() -> dict[str, list[float]]:
    """The next numbers of each generator; an uneven count of normal ones, which come in pairs."""
    numbers = {
        "Python": [random.random() for _ in range(3)],
        "Python's normal": [random.gauss(0, 1)],
        "numpy": np.random.rand(3).tolist(),
        "numpy's normal": [float(np.random.normal())],
        "PyTorch": torch.rand(3).tolist(),
    }
    if torch.cuda.is_available():
        numbers["PyTorch on the GPU"] = torch.rand(3, device="cuda").tolist()
    return numbers


def _numbers_ahead() -> dict[str, list[float]]:
    """The same numbers, which are still the next ones afterwards."""
    python, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        numbers = _next_numbers()
    random.setstate(python)
    np.random.set_state(numpys)
    return numbers


@dataclass(frozen=True)
class _Resumed:
    """A run that was saved after some steps, and the one that has loaded it. `early` are the numbers
    ahead when the answer was made, `ahead` those before the save, `after` those after it and `loaded`
    those of the other run; `drawn` are PyTorch's if numbers were drawn after the load."""

    second: _Job
    states: list[dict]  # of model, optimizer, scheduler and sampler when they were saved
    early: dict
    ahead: dict
    after: dict
    drawn: list[float]
    loaded: dict


def _resumed(answer, draw) -> _Resumed:
    data = _data(draw)
    first = _job(draw.seed(), data)
    first.step()
    early, made = _numbers_ahead(), answer(*first.parts())  # as a script does, before it saves
    for _ in range(draw.integer(3, 4)):
        first.step()
    if not np.random.get_state()[3]:  # now numpy keeps the second one of a pair
        np.random.normal()
    if random.getstate()[2] is None:  # and so does Python
        random.gauss(0, 1)
    ahead = _numbers_ahead()
    saved = through_file(made.state_dict())
    after, states = _numbers_ahead(), [through_file(part.state_dict()) for part in first.parts()]
    torch.randperm(5)
    drawn = torch.rand(3).tolist()
    second = _job(draw.seed(), data)
    for _ in range(2):
        second.step()
    answer(*second.parts()).load_state_dict(saved)
    return _Resumed(second, states, early, ahead, after, drawn, _next_numbers())


training_state = Exercise(
    "9.3",
    "TrainingState",
    points=3,
    minutes=30,
    kind="core",
    parameters=("model", "optimizer", "scheduler", "sampler"),
    hints=[
        (
            "List everything that a training step reads and that an earlier step has changed. The "
            "weights are one entry of that list."
        ),
        (
            "Each of the four parts has `state_dict` and `load_state_dict`. For the random numbers "
            "there are `random.getstate`, `np.random.get_state` and `torch.get_rng_state`, each with "
            "its counterpart. Which of these give something that is no tensor, number or tuple?"
        ),
        (
            "Put the four states and the generators' into one dict, numpy's words as a list of "
            "integers and with all that stands behind them. Take the names from inside a DDP wrapper. "
            "Load the parts first and the random states last, because loading may draw numbers."
        ),
    ],
    misconceptions={
        "not-plain": "`torch.load(..., weights_only=True)` refuses what you saved: there is an object "
        "in it, an array for instance. Save its numbers as a list or a tensor.",
        "part-lost": "This part does not go on from where it was saved. Save all that its `state_dict()` gives, and "
        "hand it to `load_state_dict`: beside its numbers a model has buffers, an optimizer momenta, a scheduler "
        "its count and a sampler its position.",
        "generator-lost": "The next random numbers of this generator are others than in the undisturbed run. A seed "
        "says where it began. Its state says where it is: save all of it, and put it back.",
        "half-a-pair": "Normally distributed numbers are made in pairs, and the second of a pair waits "
        "in the state. Save all that `get_state` returns.",
        "gpu-lost": "A GPU has a generator of its own, and its state does not go back to it: save "
        "`torch.cuda.get_rng_state()` where there is a GPU.",
        "taken-early": "The random states are those of the moment when `TrainingState` was made. It is "
        "made once and saved often: ask the generators in `state_dict`.",
        "save-draws": "A save changes the random numbers of the run that goes on: it seeds a generator or "
        "draws from one. `state_dict` only reads their states.",
        "random-first": "PyTorch's random state is restored too early: what is loaded after it draws "
        "numbers. Restore the generators last.",
        "not-strict": "The state of another model is loaded without a word, and the weights stay as "
        "they were made. Do not use `strict=False`.",
        "wrapper": "DistributedDataParallel puts `module.` in front of every name, and it alone is to be taken off. A "
        "plain model has no `.module`, or a part of its own with this name: ask `isinstance(model, "
        "DistributedDataParallel)`, and save and load what is inside.",
    },
    failures={"no attribute 'module'": "wrapper"},
    at_home=True,
)


@training_state.requires("torch.load(..., weights_only=True) reads the state")
def torch_load_weights_only_true_reads_the_state(answer, draw):
    job = _job(draw.seed(), _data(draw))
    job.step()
    state = answer(*job.parts()).state_dict()
    expect_type(state, dict)
    through_file(state)


def _requires_part(index: int, text: str) -> None:
    """Adds the requirement that a part comes back."""

    @training_state.requires(text, needs_earlier=True)
    def the_part_comes_back(answer, draw):
        resumed = _resumed(answer, draw)
        got = through_file(resumed.second.parts()[index].state_dict())
        expect(got, resumed.states[index], likely={"part-lost": True})


_requires_part(0, "the model comes back, with its buffers")
_requires_part(1, "the optimizer comes back")
_requires_part(2, "the scheduler comes back")
_requires_part(3, "the sampler comes back")


@training_state.requires("the next random numbers are those that would have come")
def the_next_random_numbers_are_those_that_would(answer, draw):
    resumed = _resumed(answer, draw)
    for name, numbers in resumed.ahead.items():
        what, likely = f"{name} numbers after a save", {"save-draws": True}
        expect(resumed.after[name], numbers, what=what, likely=likely)
    for name, numbers in resumed.ahead.items():
        mistakes = {
            "taken-early": resumed.early[name],
            "random-first": resumed.drawn if name == "PyTorch" else False,
            "half-a-pair": name.endswith("normal"),
            "gpu-lost": name.endswith("GPU"),
            "generator-lost": True,
        }
        expect(resumed.loaded[name], numbers, what=f"{name} numbers", likely=mistakes)
    if not torch.cuda.is_available():
        _check_gpus_state(answer, draw)


@contextlib.contextmanager
def _pretended_gpu(state: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Within the block torch.cuda has a GPU whose generator has this state, as far as random states go;
    yields a list of the states that are put in its place."""
    restored = []
    functions = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_rng_state": lambda device=None: state.clone(),
        "get_rng_state_all": lambda: [state.clone()],
        "set_rng_state": lambda new, device=None: restored.append(new),
        "set_rng_state_all": restored.extend,
    }
    with mock.patch.multiple(torch.cuda, **functions):
        yield restored


def _check_gpus_state(answer, draw) -> None:
    """A GPU's generator is saved, and what was saved comes back to it."""
    job = _job(draw.seed(), _data(draw))
    state = draw.integers(16, low=0, high=255).to(torch.uint8)
    made = answer(*job.parts())
    with _pretended_gpu(state) as restored:
        made.load_state_dict(through_file(made.state_dict()))
    what = "the random states that go back to the GPU"
    expect(restored, [state], what=what, likely={"gpu-lost": True})


@training_state.requires("a resumed run is the run that nothing disturbed", needs_earlier=True)
def a_resumed_run_is_the_run_that_nothing(answer, draw):
    data, seed = _data(draw), draw.seed()
    undisturbed = _job(seed, data)
    losses = [undisturbed.step() for _ in range(9)]
    first = _job(seed, data)
    got = [first.step() for _ in range(4)]
    saved = through_file(answer(*first.parts()).state_dict())
    second = _job(draw.seed(), data)
    answer(*second.parts()).load_state_dict(saved)
    got += [second.step() for _ in range(5)]
    expect(got, losses, each="step", what="the loss")
    expected = dict(undisturbed.model.state_dict())
    expect(dict(second.model.state_dict()), expected, what="the model at the end")


@training_state.requires("the state of another model is refused", needs_earlier=True)
def the_state_of_another_model_is_refused(answer, draw):
    job = _job(draw.seed(), _data(draw))
    saved = through_file(answer(*job.parts()).state_dict())
    other = nn.Sequential()
    for i, part in enumerate(job.model):
        other.add_module(f"layer{i}", part)
    try:
        answer(other, *job.parts()[1:]).load_state_dict(saved)
    except Exception:  # noqa: BLE001 - whatever the parts raise
        return
    raise Wrong("not-strict", expected="an exception: the names do not fit", got="none")


class _WithAModule(nn.Module):
    """A model of which a part has the name that DDP's wrapper has for the whole."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.module, self.head = part, nn.Linear(3, 2)


def _handed_over(answer, seeds, data, wrappers) -> Any:
    """The names and values of a model that was saved and of one that has loaded its state, each wrapped
    by one of the wrappers; or how that failed."""
    jobs = [_job(seed, data) for seed in seeds]
    models = [wrap(job.model.to(device())) for wrap, job in zip(wrappers, jobs, strict=True)]
    states = [answer(m, *job.parts()[1:]) for m, job in zip(models, jobs, strict=True)]
    try:
        states[1].load_state_dict(through_file(states[0].state_dict()))
    except RuntimeError as error:
        return Raised(f"RuntimeError: {error}")
    plain = [model.module if isinstance(model, DDP) else model for model in models]
    return [dict(model.state_dict()) for model in plain]


def _across_wrappers(rank, answer, seeds, data) -> dict[str, Any]:
    kinds = {
        "from DDP to plain": (DDP, nn.Module.train),
        "from plain to DDP": (nn.Module.train, DDP),
        "a model that has a part called `module`": (_WithAModule, _WithAModule),
    }
    return {what: _handed_over(answer, seeds, data, kind) for what, kind in kinds.items()}


@training_state.requires(
    "a state fits with and without DistributedDataParallel", needs_earlier=True
)
def a_state_fits_with_and_without_distributeddataparallel(answer, draw):
    seeds, data = [draw.seed(), draw.seed()], _data(draw)
    [reports] = run(_across_wrappers, 1, answer, seeds, data)
    for what, report in reports.items():
        if isinstance(report, Raised):
            raise Wrong("wrapper", expected=f"a state that fits: {what}", got=report)
        saved, loaded = report
        expect(loaded, saved, what=what, likely={"wrapper": True})
