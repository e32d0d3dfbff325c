"""What the hosts of a cluster have, and whether ranks on them start and reach each other.

    python -m course_utils doctor --cluster 2                 two engines on this machine
    python -m course_utils doctor --cluster .../security/ipcontroller-client.json

One line a finding, by host. Nothing is changed, and nothing stays.
"""

import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from course_hosts import agent, cluster, hosts
from course_utils.launch import RankFailure, launch

_CLOCK = 1.0  # seconds between two clocks beyond which log lines of two hosts mislead
_NUMBERS, _ROUNDS = 1_000_000, 5


def report(value: str) -> bool:
    """Prints the findings about the cluster that COURSE_CLUSTER=value asks for; whether all is well."""
    well = True
    with cluster.client_for(value) as client:
        able = []
        for host, about in cluster.look(client).items():
            if _wrong(_of_host(host, about)):
                well = False
            else:
                able.append(host)
        return not _wrong(_together(able)) and well


def _wrong(findings: Iterator[tuple[bool, str]]) -> bool:
    """Prints (whether that is well, a sentence) as they come; whether something is wrong."""
    wrong = False
    for good, sentence in findings:
        print(f"{'ok   ' if good else 'WRONG'}  {sentence}", flush=True)
        wrong |= not good
    return wrong


def _of_host(host, about):
    here = agent.versions()
    said = ", ".join(f"{what} {version}" for what, version in about["versions"].items())
    other = [what for what, version in about["versions"].items() if version != here[what]]
    if other:
        own = ", ".join(f"{what} {here[what]}" for what in other)
        yield False, f"{host.name}: {said}, but {own} here: install the same there."
    else:
        yield True, f"{host.name}: {said}, as here."
    try:
        asked = time.time()
        has = host.call("equipment")
        yield True, f"{host.name}: {_equipment(has)}."
        yield _clock(host, has["clock"] - (asked + time.time()) / 2, (time.time() - asked) / 2)
        if not other:
            yield _ranks_start(host)
    except hosts.HostLost as lost:
        yield False, str(lost)


def _equipment(has):
    total, free = (round(size / 1e9) for size in has["memory"])
    kinds = f" ({', '.join(sorted(set(has['names'])))})" if has["names"] else ""
    gpus = f"{has['gpus']} GPUs{kinds}" if has["gpus"] else "no GPU"
    return f"{has['cores']} CPU cores, {total} GB of memory of which {free} are free, {gpus}"


def _clock(host, apart, doubt):
    if abs(apart) <= _CLOCK + doubt:
        return True, f"{host.name}: its clock is this machine's, within {_CLOCK:g} s."
    return False, (
        f"{host.name}: its clock is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} this "
        "machine's: have both follow a time server, or the lines of two logs cannot be put in order."
    )


def _ranks_start(host):
    began = time.monotonic()
    try:
        with hosts.choose([host]):
            launch(_nothing, 2)
    except (RankFailure, RuntimeError, OSError) as error:
        return False, f"{host.name}: two ranks do not start there: {error}"
    return True, f"{host.name}: two ranks start there, in {time.monotonic() - began:.1f} s."


def _together(able):
    if len(able) < 2:
        return
    names = ", ".join(host.name for host in able)
    try:
        with hosts.choose(able):
            seconds = launch(_adds, len(able))
    except (RankFailure, RuntimeError, OSError) as error:
        yield False, f"{names}: ranks on all of them together fail: {error}"
        return
    size = _NUMBERS * 4 / 1e6
    yield (
        True,
        (
            f"{names}: a rank on each, an all-reduce of {size:g} MB between them gives the right sum, in "
            f"{max(seconds):.3f} s (median of {_ROUNDS})."
        ),
    )


def _nothing(rank):
    pass


def _adds(rank: int) -> float:
    """Seconds that an all-reduce takes, the median of some. Raises where a sum is wrong."""
    seconds, ranks = [], dist.get_world_size()
    for _ in range(_ROUNDS):
        numbers = torch.full((_NUMBERS,), float(rank))
        began = time.monotonic()
        dist.all_reduce(numbers)
        seconds.append(time.monotonic() - began)
        if not (numbers == ranks * (ranks - 1) / 2).all():
            raise RuntimeError("the all-reduce gives a wrong sum")
    return statistics.median(seconds)
