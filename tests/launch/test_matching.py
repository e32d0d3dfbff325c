"""What the records prove: which calls meet, and whose call lacks whom."""

import json
from pathlib import Path

import pytest

from course_utils.launch.story import calls
from course_utils.launch.story.matching import Meetings


def call(kind: str = "all_reduce", group: str = "a", me: int = 0, members=(0, 1), **about) -> dict:
    return {"world": "", "me": me, "group": group, "members": members, "kind": kind} | about


def send(to: int, me: int = 0) -> dict:
    return call("send", me=me, peer=to, tensors=[["float32", [1]]])


def recv(of: int | None, me: int = 0) -> dict:
    about = {} if of is None else {"peer": of}
    return call("recv", me=me, tensors=[["float32", [1]]], **about)


@pytest.fixture
def noted(tmp_path: Path):
    """Writes records as ranks do: for each rank a list of calls and of lines that are no calls."""

    def write(*ranks: list) -> Meetings:
        paths = [str(tmp_path / str(rank)) for rank in range(len(ranks))]
        for path, made in zip(paths, ranks):
            calls.prepare(path)
            with open(path, "a") as record:
                known = []
                for each in made:
                    if isinstance(each, dict) and each not in known:
                        known.append(each)
                        record.write(json.dumps(each) + "\n")
                    record.write(f"{known.index(each) if isinstance(each, dict) else each}\n")
        meetings = Meetings(paths)
        meetings.update()
        return meetings

    return write


ONE, TWO = call(), call(me=1)
OTHER = call(group="b")
LACKS = {
    "the other has called": ([ONE], [TWO], set()),
    "the other has not": ([ONE], [], {1}),
    "the other has made fewer": ([ONE, ONE], [TWO], {1}),
    "the other has made more": ([ONE], [TWO] * 300, set()),
    "the other has called in another group": ([ONE], [call(group="b", me=1)], {1}),
    "the other has sent": ([recv(1)], [send(0, me=1)], set()),
    "the other receives too": ([recv(1)], [recv(0, me=1)], {1}),
    "nobody has sent to who takes all": ([recv(None)], [], {1}),
    "somebody has": ([recv(None)], [send(0, me=1)], set()),
    "one of two has come": ([recv(None), recv(None)], [send(0, me=1)], {1}),
    "it came before": ([recv(1), recv(None)], [send(0, me=1), send(0, me=1)], set()),
    "it is not in the group": ([call(members=(0,))], [], set()),
    "the other was refused": ([ONE], [TWO, "!0"], {1}),
    "a key that nobody has set": ([call(calls.KEY, members=())], [], {1}),
    "a key that was set": ([call(calls.KEY, members=()), ".0"], [], set()),
    "a world of its own": ([ONE | {"world": "x"}], [], {None}),
}


@pytest.mark.parametrize("name", LACKS)
def test_whom_a_call_lacks(name, noted):
    *ranks, lacks = LACKS[name]
    meetings = noted(*ranks)
    newest = meetings.newest(0)
    assert (meetings.lacks(0, newest) if newest else set()) == lacks
    assert bool(meetings.lacking(0)) == bool(lacks)
    assert bool(meetings.unmet().get(0)) == bool(lacks - {None}) or "key" in name


def test_a_record_that_is_not_complete_proves_nothing(noted, tmp_path):
    meetings = noted([ONE], [])
    calls.give_up(str(tmp_path / "1"))  # what a rank does whose disk is full
    meetings.update()
    assert meetings.lacking(0) == {} == meetings.unmet()


def test_a_call_that_was_given_up_is_not_missed(noted):
    assert noted([ONE], []).unmet()
    assert not noted([ONE, "?"], []).unmet()


def shaped(*size: int, me: int = 0, **about) -> dict:
    return call(me=me, tensors=[["float32", size]], **about)


UNLIKE = {
    "shapes, many calls ago": ([shaped(3), *[OTHER] * 1000], [shaped(4, me=1), *[OTHER] * 1000]),
    "shapes, of a call that others lack": ([shaped(3)], [shaped(4, me=1)], []),
    "operations": ([call(operation="SUM")], [call(me=1, operation="MAX")]),
    "roots": ([call("broadcast", peer=0)], [call("broadcast", me=1, peer=1)]),
    "types": (
        [call(splits=[[1], [1]], dtype="int32")],
        [call(me=1, splits=[[1], [1]], dtype="int64")],
    ),
    "sizes of a message": (
        [send(1) | {"tensors": [["float32", [3]]]}],
        [recv(0, me=1) | {"tensors": [["float32", [2]]]}],
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_calls_that_do_not_match(name, noted):
    ranks = [list(rank) for rank in UNLIKE[name]]
    if len(ranks) == 3:
        ranks = [[each | {"members": (0, 1, 2)} for each in rank] for rank in ranks]
    wrong = noted(*ranks).mismatch()
    assert list(wrong) == [0, 1] and wrong[0] != wrong[1]


def test_the_splits_of_both_sides_have_to_fit(noted):
    def both(first, second):
        def made(me, splits):
            return call("all_to_all_single", me=me, splits=splits, dtype="float32")

        return noted([made(0, first)], [made(1, second)]).mismatch()

    assert both([[3, 1], [3, 2]], [[2, 2], [1, 2]]) is None
    assert both([[3, 1], [3, 1]], [[2, 2], [2, 2]])


def at(line: int, me: int) -> dict:
    return call("barrier", me=me, where=["mine.py", line, "train"])


def test_where_the_ways_of_ranks_parted(noted):
    """Rank 1 leaves out line 2 in its second turn."""
    turn = [1, 2, 3]
    zero, one = [*turn, *turn, *turn], [*turn, 1, 3, *turn]
    apart = noted([at(n, 0) for n in zero], [at(n, 1) for n in one]).apart([0])
    assert {rank: call.where.line for rank, (call, _) in apart.items()} == {0: 2, 1: 3}
    assert noted([at(n, 0) for n in turn], [at(n, 1) for n in turn]).apart([0]) is None


def test_a_branch_that_was_meant_is_not_where_ways_parted(noted):
    assert noted([at(1, 0), at(2, 0)], [at(1, 1), at(5, 1)]).apart([0]) is None


def test_who_was_never_at_a_line_is_said(noted):
    apart = noted([at(3, 0), at(4, 0)], [at(2, 1), at(3, 1), at(4, 1)]).apart([1])
    assert {rank: absent for rank, (_, absent) in apart.items()} == {0: set(), 1: {0}}


def behind(*begun: int, queued: tuple = ()) -> dict:
    return {"begun": [[number] for number in begun], "queued": list(queued), "behind": begun[0]}


B, B1 = call(group="b"), call(group="b", me=1)
QUEUES = {
    "both have begun": ([ONE], [TWO], {0: behind(0), 1: behind(0)}, False),
    "one has not called": ([ONE], [], {0: behind(0)}, True),
    "one has called, and computes": ([ONE], [TWO], {0: behind(0)}, False),
    "crosswise": (
        [ONE, B],
        [B1, TWO],
        {0: behind(0, queued=(1,)), 1: behind(0, queued=(1,))},
        True,
    ),
    "a message under way": ([send(1)], [recv(0, me=1)], {0: behind(0), 1: behind(0)}, False),
}


@pytest.mark.parametrize("name", QUEUES)
def test_only_what_lacks_somebody_is_without_an_end(name, noted):
    *ranks, pending, without_an_end = QUEUES[name]
    assert noted(*ranks).none_can_end(pending) == without_an_end
