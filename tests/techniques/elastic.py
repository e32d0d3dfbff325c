"""Chapter 9: other ranks go on where some have stopped, with a checkpoint between them."""

from collections.abc import Iterator
from functools import partial

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ConstantLR

from course_exercises.authoring import load_answer
from course_utils.hardware import device
from tests.techniques import Job, Trained, mistake, sgd, technique, trained
from tests.techniques.data_parallel import share_of_loss
from tests.techniques.jobs import (
    EPOCHS,
    GLOBAL_BATCH,
    SAMPLES,
    STEPS_PER_EPOCH,
    ElasticSampler,
    samples,
)

Checkpoints, TrainingState = load_answer("9.1"), load_answer("9.3")


def go_on(forgotten: str, rank: int, job: Job) -> Trained:
    """Trains as many steps as the job has batches; which samples they are, the sampler knows.

    `forgotten` names what does not come back from the checkpoint, if anything.
    """
    inputs, targets = samples()
    model = DistributedDataParallel(job.model(seed=rank))
    optimizer = sgd(model, job.momentum)
    sampler = ElasticSampler(SAMPLES, GLOBAL_BATCH, rank, dist.get_world_size())
    state = TrainingState(model, optimizer, ConstantLR(optimizer, factor=1.0), sampler)
    checkpoints = Checkpoints(job.folder)
    step = 0
    if (found := checkpoints.load()) is not None:
        parts = {"optimizer": optimizer, "sampler": sampler}
        fresh = {name: part.state_dict() for name, part in parts.items()}
        step, stored = found
        state.load_state_dict(stored)
        if forgotten:
            parts[forgotten].load_state_dict(fresh[forgotten])
    # the batches first: when they end, zip must not have asked the sampler for one more
    for (_, whole), mine in zip(job.batches, rows_from(sampler, step)):
        optimizer.zero_grad()
        own = inputs[mine].to(device()), targets[mine].to(device())
        share_of_loss(model, *own, len(whole)).backward()
        optimizer.step()
        step += 1
    checkpoints.save(step, state.state_dict())
    return trained(model.module)


def rows_from(sampler: ElasticSampler, step: int) -> Iterator[list[int]]:
    """This rank's samples of each step that is left."""
    for epoch in range(step // STEPS_PER_EPOCH, EPOCHS):
        sampler.set_epoch(epoch)
        yield from sampler


technique([(2, 1, 2), (3, 1)], ["sampled"], "elastic")(partial(go_on, ""))
mistake([(2, 1, 2)], ["sampled"], "elastic_from_the_first_sample")(partial(go_on, "sampler"))
mistake([(2, 1)], ["sampled"], "elastic_without_the_optimizers_state")(partial(go_on, "optimizer"))
