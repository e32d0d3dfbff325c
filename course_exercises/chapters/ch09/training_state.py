"""Exercise 9.3, `TrainingState`: what it asks for, and how it is checked."""

import contextlib
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, run, same
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


def _random_numbers() -> dict[str, list[float]]:
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
    """The next numbers of each generator, which are still the next ones afterwards."""
    python, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        numbers = _random_numbers()
    random.setstate(python)
    np.random.set_state(numpys)
    return numbers


def _copied(state: Any) -> Any:
    """A copy that shares no memory with what the training goes on to change."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@dataclass(frozen=True)
class _Resumed:
    """A run that was saved after some steps, what it was at that moment, and the one that has
    loaded it."""

    second: _Job
    states: list[dict]  # of model, optimizer, scheduler and sampler when they were saved
    numbers: dict  # that the first run would have drawn next, had nobody saved it
    numbers_saved: dict  # that it draws next
    numbers_early: dict  # that it would have drawn when the answer was made
    numbers_loaded: dict
    rng_evolved: list[float]  # PyTorch's, if loading had used some of them after they were restored


def _resumed(answer, draw) -> _Resumed:
    data, seeds = _data(draw), [draw.seed(), draw.seed()]
    early = _job(seeds[0], data)
    early.step()
    numbers_early = _random_numbers()
    first = _job(seeds[0], data)
    first.step()
    made = answer(*first.parts())  # as a script does, before the steps that it saves
    for _ in range(draw.integer(3, 4)):
        first.step()
    np.random.normal()  # one of a pair, so that numpy keeps the other
    if first.sampler.position % 2:
        random.gauss(0, 1)
    random.gauss(0, 1)
    numbers = _numbers_ahead()
    saved = through_file(made.state_dict())
    states = [_copied(part.state_dict()) for part in first.parts()]
    rng = torch.get_rng_state()
    numbers_saved = _random_numbers()
    torch.set_rng_state(rng)
    torch.randperm(5)
    evolved = torch.rand(3).tolist()
    second = _job(seeds[1], data)
    for _ in range(2):
        second.step()
    answer(*second.parts()).load_state_dict(saved)
    loaded = _random_numbers()
    return _Resumed(second, states, numbers, numbers_saved, numbers_early, loaded, evolved)


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
        "model-lost": "The weights are not those that were saved.",
        "buffers-lost": "The parameters come back, the buffers do not. BatchNorm's running mean is "
        "no parameter, but `model.state_dict()` has it.",
        "optimizer-lost": "The optimizer starts anew. Its momenta are as much a part of the next step "
        "as the weights.",
        "scheduler-lost": "You do not bring back all of the scheduler's state: the learning rate falls at the wrong steps.",
        "sampler-lost": "The sampler starts anew: samples come again.",
        "python-lost": "Python's random numbers are others than in the undisturbed run.",
        "numpy-lost": "numpy's random numbers are others than in the undisturbed run.",
        "torch-lost": "PyTorch's random numbers are others than in the undisturbed run: dropout "
        "leaves out other values.",
        "gpu-lost": "A GPU has a generator of its own, and its state does not come back: save "
        "`torch.cuda.get_rng_state()` where there is a GPU.",
        "half-a-pair": "Normally distributed numbers are made in pairs, and the second of a pair waits "
        "in the state. Save all that `get_state` returns.",
        "taken-early": "The random states are those of the moment when `TrainingState` was made. It is "
        "made once and saved often: ask the generators in `state_dict`.",
        "save-draws": "A save changes the random numbers of the run that goes on: it seeds a generator or "
        "draws from one. `state_dict` only reads their states.",
        "random-first": "PyTorch's random state is restored too early: what is loaded after it draws "
        "numbers. Restore the generators last.",
        "not-strict": "The state of another model is loaded without a word, and the weights stay as "
        "they were made. Do not use `strict=False`.",
        "module-prefix": "A state that was saved under DistributedDataParallel does not fit the plain "
        "model, or the other way round: the wrapper puts `module.` in front of every name.",
        "wrapped-only": "You take `.module` of every model, and a plain one has none.",
        "own-module": "A model may have a part of its own that is called `module`. What is to be taken off is "
        "DistributedDataParallel alone: ask `isinstance(model, DistributedDataParallel)`.",
    },
    failures={"no attribute 'module'": "wrapped-only"},
    at_home=True,
)


@training_state.requires("torch.load(..., weights_only=True) reads the state")
def torch_load_weights_only_true_reads_the_state(answer, draw):
    job = _job(draw.seed(), _data(draw))
    job.step()
    state = answer(*job.parts()).state_dict()
    expect_type(state, dict)
    through_file(state)


def _requires_part(index: int, text: str, slug: str) -> None:
    """Adds the requirement that a part comes back."""

    @training_state.requires(text, needs_earlier=True)
    def the_part_comes_back(answer, draw):
        resumed = _resumed(answer, draw)
        got = _copied(resumed.second.parts()[index].state_dict())
        mistakes = {
            "buffers-lost": index == 0 and _parameters_fit(resumed),
            slug: True,
        }
        expect(got, resumed.states[index], likely=mistakes)


def _parameters_fit(resumed: _Resumed) -> bool:
    own = resumed.second.model.named_parameters()
    return all(same(parameter, resumed.states[0][name]) for name, parameter in own)


_requires_part(0, "the model comes back, with its buffers", "model-lost")
_requires_part(1, "the optimizer comes back", "optimizer-lost")
_requires_part(2, "the scheduler comes back", "scheduler-lost")
_requires_part(3, "the sampler comes back", "sampler-lost")


@training_state.requires("the next random numbers are those that would have come")
def the_next_random_numbers_are_those_that_would(answer, draw):
    resumed = _resumed(answer, draw)
    slugs = {
        "Python": "python-lost",
        "Python's normal": "half-a-pair",
        "numpy": "numpy-lost",
        "numpy's normal": "half-a-pair",
        "PyTorch": "torch-lost",
        "PyTorch on the GPU": "gpu-lost",
    }
    for name, numbers in resumed.numbers.items():
        what, likely = f"{name} numbers after a save", {"save-draws": True}
        expect(resumed.numbers_saved[name], numbers, what=what, likely=likely)
    for name, numbers in resumed.numbers.items():
        mistakes = {
            "taken-early": resumed.numbers_early[name],
            "random-first": resumed.rng_evolved if name == "PyTorch" else False,
            slugs[name]: True,
        }
        expect(resumed.numbers_loaded[name], numbers, what=f"{name} numbers", likely=mistakes)
    if not torch.cuda.is_available():
        _check_gpus_state(answer, draw)


class _PretendedGPU:
    """The state of a GPU's generator, on a machine that has no GPU, and what was put in its place."""

    def __init__(self, state: torch.Tensor) -> None:
        self.state = state
        self.restored: list[torch.Tensor] = []

    def get(self, device: Any = None) -> torch.Tensor:
        return self.state.clone()

    def set(self, state: torch.Tensor, device: Any = None) -> None:
        self.restored.append(state)

    @contextlib.contextmanager
    def visible(self) -> Iterator[None]:
        """Within the block torch.cuda has this GPU, as far as random states go."""
        functions = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_rng_state": self.get,
            "get_rng_state_all": lambda: [self.get()],
            "set_rng_state": self.set,
            "set_rng_state_all": lambda states: [self.set(state) for state in states],
        }
        with contextlib.ExitStack() as stack:
            for name, function in functions.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, function))
            yield


def _check_gpus_state(answer, draw) -> None:
    """A GPU's generator is saved, and what was saved comes back to it."""
    job = _job(draw.seed(), _data(draw))
    gpu = _PretendedGPU(draw.integers(16, low=0, high=255).to(torch.uint8))
    made = answer(*job.parts())
    with gpu.visible():
        made.load_state_dict(through_file(made.state_dict()))
    what = "the random states that go back to the GPU"
    expect(gpu.restored, [gpu.state], what=what, likely={"gpu-lost": True})


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


def _check_own_module(answer, draw) -> None:
    data = _data(draw)
    jobs = [_job(draw.seed(), data) for _ in range(2)]
    models = [_WithAModule(job.model) for job in jobs]
    states = [answer(m, *job.parts()[1:]) for m, job in zip(models, jobs, strict=True)]
    try:
        states[1].load_state_dict(through_file(states[0].state_dict()))
    except RuntimeError as error:
        got = f"RuntimeError: {error}"
        raise Wrong("own-module", expected="a state that fits", got=got) from None
    got, expected = (dict(model.state_dict()) for model in reversed(models))
    expect(got, expected, likely={"own-module": True})


def _across_a_wrapper(rank, answer, seeds, data) -> list:
    """The model's names and values after a state went from DDP to a plain model and back, and what
    they should be."""
    reports = []
    for wrapped in (0, 1):
        jobs = [_job(seed, data) for seed in seeds]
        models = [job.model.to(device()) for job in jobs]
        models[wrapped] = DDP(models[wrapped])
        saved = answer(models[0], *jobs[0].parts()[1:]).state_dict()
        try:
            answer(models[1], *jobs[1].parts()[1:]).load_state_dict(_copied(saved))
        except RuntimeError as error:
            reports.append(Raised(f"RuntimeError: {error}"))
        else:
            reports.append([dict(job.model.state_dict()) for job in jobs])
    return reports


@training_state.requires(
    "a state fits with and without DistributedDataParallel", needs_earlier=True
)
def a_state_fits_with_and_without_distributeddataparallel(answer, draw):
    seeds, data = [draw.seed(), draw.seed()], _data(draw)
    [reports] = run(_across_a_wrapper, 1, answer, seeds, data)
    for what, report in zip(("from DDP to plain", "from plain to DDP"), reports, strict=True):
        if isinstance(report, Raised):
            raise Wrong("module-prefix", expected=f"a state that fits, {what}", got=report)
        saved, loaded = report
        expect(loaded, saved, what=what, likely={"module-prefix": True})
    _check_own_module(answer, draw)
