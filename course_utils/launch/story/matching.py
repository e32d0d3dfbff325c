"""Finds the first point at which the ranks' collective calls do not match.

A meeting has a world, a group and its members. The ranks of a world of the learner's own agree on
its name without waiting, in its store; the kernel translates their numbers into the launch's.
"""

import math
from collections import defaultdict

from course_utils.comm.collectives import POINT_TO_POINT
from course_utils.launch.story.calls import DESTROY, NEW_GROUP, NotedCall


def first_mismatch(
    records: list[list[NotedCall]], groups: bool = True
) -> dict[int, NotedCall] | None:
    """Returns the calls that meet and do not match, by rank; None if all calls match.

    `records` holds each rank's calls, by rank. The n-th collective of a group meets the n-th of
    the group's other ranks; the n-th send from one rank to another meets the n-th recv. All ranks
    of a world make all its groups: the n-th new_group of a rank meets the n-th of the others, if
    `groups` are to be compared: also of ranks that have come to their end, for with groups made in
    different orders that is luck.
    """
    meetings = defaultdict(dict)
    for rank, record in enumerate(records):
        anything = any(call.kind == "recv" and call.peer is None for call in record)
        for call in record:
            if call.kind == DESTROY or (call.kind == NEW_GROUP and not groups):
                continue
            # After a recv from any rank, nobody can count what came from whom.
            if not (anything and call.kind == "recv"):
                meetings[_meeting_point(rank, call)][rank] = call
    for calls in meetings.values():
        if not _match(calls):
            return dict(sorted(calls.items()))
    return None


def lacks_a_call(records: list[list[NotedCall]], rank: int) -> bool:
    """True if the newest call of `rank`, in launch's own world, is sure not to end unless another
    rank makes another call."""
    call = records[rank][-1]
    if _untold(call):
        return False
    *group, index = _meeting_point(rank, call)
    return any(
        _sure_not_to_have(records[other], other, group, index)
        for other in _needed(rank, call) - {rank}
    )


def _sure_not_to_have(record, rank, group, index):
    """Whether this rank has not made the call with this index. Old calls leave the record."""
    points = [_meeting_point(rank, call) for call in record]
    known = [last for *before, last in points if before == group]
    if known:
        return max(known) < index
    return [call.number for call in record] == list(range(len(record)))


def none_can_end(records: list[list[NotedCall]], pending: dict[int, dict]) -> bool:
    """True if nothing that ranks wait behind will ever end unless one of them makes another call.

    pending: for each rank that waits for a device with queues, what `host_waits.follow` publishes. A
    call that has begun ends when all ranks that it needs have begun theirs. What a rank does that
    does not wait is not known: there, what has been called counts as begun.
    """
    begun, waiting = defaultdict(set), []
    for rank, record in enumerate(records):
        here = pending.get(rank, {"begun": [], "queued": []})
        made = {call.number: call for call in record}
        for number in made.keys() - here["queued"]:
            begun[_meeting_point(rank, made[number])].add(rank)
        waiting += [(rank, [made[n] for n in unit if n in made]) for unit in here["begun"]]
    return not any(_all_met(rank, unit, begun) for rank, unit in waiting)


def all_will_end(records: list[list[NotedCall]]) -> bool:
    """True if each call on record has met the calls of all ranks that it needs: then what waits will
    end, on a machine so busy that nobody has moved for seconds too. Of some it cannot be told."""
    made = defaultdict(set)
    for rank, record in enumerate(records):
        for call in record:
            made[_meeting_point(rank, call)].add(rank)
    return all(
        not any(map(_untold, record)) and _all_met(rank, record, made)
        for rank, record in enumerate(records)
    )


def _untold(call):
    """Whether it cannot be told from the records which ranks' calls this one needs."""
    any_source = call.peer is None and call.kind == "recv"
    return call.world or call.kind in (DESTROY, NEW_GROUP) or any_source


def _all_met(rank, unit, begun):
    return all(_needed(rank, call) <= begun[_meeting_point(rank, call)] for call in unit)


def _needed(rank, call):
    return {rank, call.peer} if call.kind in POINT_TO_POINT else set(call.members)


def odd_one(calls: dict[int, NotedCall]) -> int:
    """Returns the rank whose call differs from most others; of two, the second."""
    signatures = [_signature(call) for call in calls.values()]
    return min(reversed(calls), key=lambda rank: signatures.count(_signature(calls[rank])))


def _meeting_point(rank, call):
    group = call.world, call.group, call.members
    if call.kind == "send":
        return *group, rank, call.peer, call.tag, call.index
    if call.kind == "recv":
        return *group, call.peer, rank, call.tag, call.index
    return *group, call.index


def _match(calls):
    return len(set(map(_signature, calls.values()))) == 1 and all(
        _fit(rank, call, other, its)
        for rank, call in calls.items()
        for other, its in calls.items()
        if call.splits and its.splits
    )


def _fit(rank, call, other, its):
    """Whether `rank` sends as many rows to `other` as that one expects from it."""
    sent, expected = call.splits[0], its.splits[1]
    return sent[call.members.index(other)] == expected[call.members.index(rank)]


def _signature(call):
    """What has to be equal where calls meet. In collectives shapes count, as under DETAIL, even
    where the number of elements agrees; between send and recv only that number and the data type."""
    if call.kind in POINT_TO_POINT:
        return tuple((dtype, math.prod(shape)) for dtype, shape in call.tensors)
    return call.kind, call.peer, call.operation, call.tensors, call.asked
