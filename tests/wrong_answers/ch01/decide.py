"""Answers to 1.3, `decide`: wrong in a plausible way, or right in another."""

import math

from tests.wrong_answers import right, wrong


def needed(job):
    return math.ceil((job.state_bytes + job.sample_bytes) / job.gpu_bytes)


def fits(job):
    shared = job.compute_seconds / job.gpus + job.exchange_seconds
    return "data" if shared < job.compute_seconds else "one"


def cut(job, gpus_a_copy):
    if gpus_a_copy > job.gpus:
        return "none"
    return "both" if job.gpus // gpus_a_copy >= 2 else "model"


@right("1.3")
def tries_every_number_of_gpus(job):
    for gpus_a_copy in range(1, job.gpus + 1):
        if job.state_bytes + job.sample_bytes <= gpus_a_copy * job.gpu_bytes:
            break
    else:
        return "none"
    if gpus_a_copy == 1:
        saved = job.compute_seconds - job.compute_seconds / job.gpus
        return "data" if job.exchange_seconds < saved else "one"
    return "both" if 2 * gpus_a_copy <= job.gpus else "model"


@wrong("1.3", names="another-word")
def says_it_in_words(job):
    return {"data": "data parallel", "model": "model parallel"}.get(fits(job), fits(job))


@wrong("1.3", names="activations")
def counts_the_state(job):
    gpus_a_copy = math.ceil(job.state_bytes / job.gpu_bytes)
    return fits(job) if gpus_a_copy == 1 else cut(job, gpus_a_copy)


@wrong("1.3", names="activations")
def cuts_the_state_only(job):
    if needed(job) == 1:
        return fits(job)
    if job.sample_bytes >= job.gpu_bytes:
        return "none"
    return cut(job, math.ceil(job.state_bytes / (job.gpu_bytes - job.sample_bytes)))


@wrong("1.3", names="gpus-a-copy")
def floor_instead_of_ceiling(job):
    gpus_a_copy = int((job.state_bytes + job.sample_bytes) // job.gpu_bytes)
    return fits(job) if needed(job) == 1 else cut(job, gpus_a_copy)


@wrong("1.3", names="gpus-a-copy")
def wants_a_byte_to_spare(job):
    gpus_a_copy = int((job.state_bytes + job.sample_bytes) // job.gpu_bytes) + 1
    return fits(job) if gpus_a_copy == 1 else cut(job, gpus_a_copy)


@wrong("1.3", names="copies")
def there_is_always_a_gpu(job):
    if needed(job) == 1:
        return fits(job)
    return "both" if job.gpus // needed(job) >= 2 else "model"


@wrong("1.3", names="copies")
def cuts_or_copies(job):
    if needed(job) == 1:
        return fits(job)
    return "model" if needed(job) <= job.gpus else "none"


@wrong("1.3", names="cut-what-fits")
def always_a_line(job):
    return cut(job, max(2, needed(job)))


@wrong("1.3", names="copy-what-does-not-fit")
def never_looks_at_memory(job):
    return fits(job)


@wrong("1.3", names="exchange")
def the_more_the_faster(job):
    if needed(job) == 1:
        return "data" if job.gpus > 1 else "one"
    return cut(job, needed(job))


@wrong("1.3", names="exchange")
def compares_the_exchange_with_the_share(job):
    if needed(job) > 1:
        return cut(job, needed(job))
    return "data" if job.exchange_seconds < job.compute_seconds / job.gpus else "one"
