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


@wrong("1.3", names="exchange-ignored")
def the_more_the_faster(job):
    if needed(job) == 1:
        return "data" if job.gpus > 1 else "one"
    return cut(job, needed(job))


@wrong("1.3", names="exchange-feared")
def compares_with_the_share_only(job):
    if needed(job) == 1:
        return "data" if job.exchange_seconds < job.compute_seconds / 100 else "one"
    return cut(job, needed(job))


@wrong("1.3", names="activations-forgotten")
def counts_the_state(job):
    gpus_a_copy = math.ceil(job.state_bytes / job.gpu_bytes)
    return fits(job) if gpus_a_copy == 1 else cut(job, gpus_a_copy)


@wrong("1.3", names="cut-what-fits")
def always_a_line(job):
    return cut(job, max(2, needed(job)))


@wrong("1.3", names="copy-what-does-not-fit")
def never_looks_at_memory(job):
    return fits(job)


@wrong("1.3", names="never-both")
def cuts_or_copies(job):
    if needed(job) == 1:
        return fits(job)
    return "model" if needed(job) <= job.gpus else "none"


@wrong("1.3", names="one-copy-only")
def copies_whatever_is_left(job):
    if needed(job) == 1:
        return fits(job)
    if needed(job) > job.gpus:
        return "none"
    return "both" if job.gpus > needed(job) else "model"


@wrong("1.3", names="rounded-down")
def floor_instead_of_ceiling(job):
    gpus_a_copy = int((job.state_bytes + job.sample_bytes) // job.gpu_bytes)
    return fits(job) if needed(job) == 1 else cut(job, gpus_a_copy)


@wrong("1.3", names="no-limit")
def there_is_always_a_gpu(job):
    if needed(job) == 1:
        return fits(job)
    return "both" if job.gpus // needed(job) >= 2 else "model"


@wrong("1.3", names="full-is-not-too-full")
def wants_a_byte_to_spare(job):
    gpus_a_copy = int((job.state_bytes + job.sample_bytes) // job.gpu_bytes) + 1
    return fits(job) if gpus_a_copy == 1 else cut(job, gpus_a_copy)


@wrong("1.3", names="another-word")
def says_it_in_words(job):
    return {"data": "data parallel", "model": "model parallel"}.get(fits(job), fits(job))


@wrong("1.3", names="whole-batch")
def stores_a_sample_for_every_gpu(job):
    gpus_a_copy = math.ceil((job.state_bytes + job.gpus * job.sample_bytes) / job.gpu_bytes)
    return fits(job) if gpus_a_copy == 1 else cut(job, gpus_a_copy)


@wrong("1.3", names="gives-up")
def wants_a_gpu_to_spare(job):
    if needed(job) >= job.gpus:
        return "none"
    return fits(job) if needed(job) == 1 else cut(job, needed(job))


@wrong("1.3", names="copy-what-does-not-fit")
def looks_at_the_time_first(job):
    if fits(job) == "one":
        return "one"
    return "data" if needed(job) == 1 else cut(job, needed(job))


@wrong("1.3", names="never-both")
def copies_where_it_divides(job):
    if needed(job) == 1:
        return fits(job)
    if needed(job) > job.gpus:
        return "none"
    return "both" if job.gpus > needed(job) and job.gpus % needed(job) == 0 else "model"


@wrong("1.3", names="activations-not-cut")
def cuts_the_state_only(job):
    if needed(job) == 1:
        return fits(job)
    if job.sample_bytes >= job.gpu_bytes:
        return "none"
    return cut(job, math.ceil(job.state_bytes / (job.gpu_bytes - job.sample_bytes)))


@wrong("1.3", names="exchange-feared")
def compares_the_exchange_with_the_share(job):
    if needed(job) > 1:
        return cut(job, needed(job))
    return "data" if job.exchange_seconds < job.compute_seconds / job.gpus else "one"


@wrong("1.3", names="one-gpu")
def shares_where_nothing_is_lost(job):
    if needed(job) > 1:
        return cut(job, needed(job))
    shared = job.compute_seconds / job.gpus + job.exchange_seconds
    return "data" if shared <= job.compute_seconds else "one"


@wrong("1.3", names="no-such-field")
def guesses_a_field(job):
    return "one" if job.model_bytes < job.gpu_bytes else "model"


@wrong("1.3", names="returns-nothing")
def forgets_the_last_case(job):
    if needed(job) > 1:
        return cut(job, needed(job))
    if fits(job) == "one":
        return "one"


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
