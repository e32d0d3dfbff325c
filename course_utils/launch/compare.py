"""Finds the first point at which the ranks' collective calls do not match."""

import math
from collections import defaultdict

from course_utils.launch.calls import DESTROY, NEW_GROUP, POINT_TO_POINT, Call


def first_mismatch(records: list[list[Call]], groups: bool = True) -> dict[int, Call] | None:
    """Returns the calls that meet and do not match, by rank; None if all calls match.

    `records` holds each rank's calls, by rank. The n-th collective of a group meets the n-th of
    the group's other ranks; the n-th send from one rank to another meets the n-th recv. All ranks
    of a world make all its groups: the n-th new_group of a rank meets the n-th of the others, if
    `groups` are to be compared.
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
        if not _match(list(calls.values())):
            return dict(sorted(calls.items()))
    return None


def odd_one(calls: dict[int, Call]) -> int:
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
    return len({_signature(call) for call in calls}) == 1


def _signature(call):
    """What has to be equal where calls meet."""
    if call.kind in POINT_TO_POINT:
        # A tensor may arrive in one of another shape.
        return tuple((dtype, math.prod(shape)) for dtype, shape in call.tensors)
    return call.kind, call.peer, call.operation, call.tensors, call.asked
