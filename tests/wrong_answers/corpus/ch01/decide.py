"""Rarer wrong answers to 1.3, `decide`: each is right but for a few jobs."""

import math

from tests.wrong_answers import rarer
from tests.wrong_answers.ch01.decide import cut, fits, needed


@rarer("1.3")
def stores_a_sample_for_every_gpu(job):
    gpus_a_copy = math.ceil((job.state_bytes + job.gpus * job.sample_bytes) / job.gpu_bytes)
    return fits(job) if gpus_a_copy == 1 else cut(job, gpus_a_copy)


@rarer("1.3")
def wants_a_gpu_to_spare(job):
    if needed(job) >= job.gpus:
        return "none"
    return fits(job) if needed(job) == 1 else cut(job, needed(job))


@rarer("1.3")
def looks_at_the_time_first(job):
    if fits(job) == "one":
        return "one"
    return "data" if needed(job) == 1 else cut(job, needed(job))


@rarer("1.3")
def copies_where_it_divides(job):
    if needed(job) == 1:
        return fits(job)
    if needed(job) > job.gpus:
        return "none"
    return "both" if job.gpus > needed(job) and job.gpus % needed(job) == 0 else "model"


@rarer("1.3")
def shares_where_nothing_is_lost(job):
    if needed(job) > 1:
        return cut(job, needed(job))
    shared = job.compute_seconds / job.gpus + job.exchange_seconds
    return "data" if shared <= job.compute_seconds else "one"
