"""Chapter 13: an object that takes steps and hands out its state, of whatever kind its split is."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from course_exercises.authoring import load_answer, load_code
from course_utils.hardware import device
from tests.techniques import LEARNING_RATE, Job, Trained, mistake, technique

RESIDUAL = ("residual",)

Training = load_answer("13.1")
Copies, WithDDP = load_code(13, "Copies"), load_code(13, "WithDDP")
MeanOfMeans = load_code(13, "MeanOfMeans")


def state_of(training) -> dict:
    """Its state; of the chapter's copies, which have none, what a job without momentum needs."""
    if hasattr(training, "state_dict"):
        return training.state_dict()
    model = {name: p.detach().cpu().clone() for name, p in training.model.named_parameters()}
    return {"model": model, "momentum": {name: torch.zeros_like(p) for name, p in model.items()}}


def steps(make: Callable, keeps_momentum: bool, rank: int, job: Job) -> Trained:
    """Takes the job's steps, from the state in its folder where there is one, and leaves its own.

    A training shows no gradients: the last ones follow from how far the parameters went.
    """
    training = make(job.model(), lr=LEARNING_RATE, momentum=job.momentum)
    saved = job.folder and job.folder / "state.pt"
    if saved and saved.exists():
        found = torch.load(saved, weights_only=True)
        fresh = found if keeps_momentum else found | {"momentum": state_of(training)["momentum"]}
        training.load_state_dict(fresh)
    dist.barrier()  # nobody writes until all have read
    for inputs, targets in job.batches:
        before = state_of(training)
        training.step(inputs.to(device()), targets.to(device()))
    after = state_of(training)
    if saved and rank == 0:
        torch.save(after, saved)
    gradients = {
        name: (old - after["model"][name]) / LEARNING_RATE
        - job.momentum * before["momentum"][name].cpu()
        for name, old in before["model"].items()
    }
    return Trained(after["model"], gradients)


technique([1, 2, 3, 4, (3, 2), (2, 1, 4)], RESIDUAL, "capstone")(partial(steps, Training, True))
technique([2, 3], RESIDUAL, "capstone_copies")(partial(steps, Copies, True))
technique([2, 3], RESIDUAL, "capstone_with_ddp")(partial(steps, WithDDP, True))
mistake([2], RESIDUAL, "capstone_mean_of_means")(partial(steps, MeanOfMeans, True))
mistake([(2, 1)], RESIDUAL, "capstone_without_momentum")(partial(steps, Training, False))
