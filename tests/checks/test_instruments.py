"""course_exercises/authoring/ranks.py and patience.py: what is sent, in which group, what is under way, and what is
alive."""

import gc

import torch
import torch.distributed as dist

from course_exercises.authoring import patience
from course_exercises.authoring.ranks import Memory, following
from course_utils.hardware import device
from course_utils.launch import launch
from course_utils.trace.meters import Sampling


def ones(*shape):
    return torch.ones(*shape, device=device())


def calls(rank):
    other = dist.new_group()
    with following() as sent:
        work = dist.all_reduce(ones(3), async_op=True)
        dist.broadcast(ones(2, 2), 1, group=other)
        under_way = [call.kind for call in sent.open_calls()]
        work.wait()
        dist.all_gather([ones(2), ones(2)], ones(2))
        dist.all_reduce(ones(1).double(), async_op=True)
    return sent, under_way


def test_calls_are_kept_with_what_was_under_way():
    sent, under_way = launch(calls, 2)[0]
    assert under_way == ["all_reduce"] == sent.unwaited
    assert [call.kind for call in sent.calls] == [
        "all_reduce",
        "broadcast",
        "all_gather",
        "all_reduce",
    ]
    assert [call.elements for call in sent.calls] == [3, 4, 2, 1]
    assert [call.blocks for call in sent.calls] == [False, True, True, False]
    assert [call.root for call in sent.calls] == [None, 1, None, None]
    assert [call.beside for call in sent.calls] == [[], [0], [], []]
    first, broadcast, *others = (call.group for call in sent.calls)
    assert broadcast != first and set(others) == {first}
    assert sent.elements("all_reduce") == 4
    assert ("all_reduce", torch.float64) in sent.dtypes


def changes(rank):
    flat = ones(4)
    with following() as sent:
        own, halves = ones(2), flat.split(2)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (own, halves[0])]
        halves[1].mul_(2)  # another part of the same memory
        own /= 2
        for work in works:
            work.wait()
    return sent.unwaited


def test_a_tensor_that_is_changed_under_way_is_seen():
    assert launch(changes, 2) == [["all_reduce, before its tensor is changed"]] * 2


def test_memory_that_is_freed_or_gone_is_not_alive():
    memory, kept, freed = Memory(), torch.ones(3), torch.ones(3)
    for number, tensor in enumerate((kept, freed, torch.ones(3))):
        memory.show(number, tensor)
    del tensor
    assert memory.alive(lambda found: True) == [0, 1]
    freed.untyped_storage().resize_(0)
    assert memory.alive(lambda found: found == [0]) == [0]


def gathered(rank):
    """Whether a whole is alive that nobody has any more, before its gather is let go and after."""
    memory = Memory()
    with following() as sent:
        whole = ones(2 * 4)
        memory.show(0, whole)
        dist.all_gather(list(whole.chunk(2)), whole.chunk(2)[rank])
        del whole
        sent.let_go()
        return memory.alive(lambda found: not found)


def test_a_call_that_is_over_can_be_let_go():
    assert launch(gathered, 2) == [[], []]


def test_what_a_thread_lets_go_of_late_is_no_peak(monkeypatch):
    gc.collect()  # what earlier tests have left
    others, late = Sampling().held(), [ones(1000)]
    monkeypatch.setattr(patience, "wait_for_gloo", late.clear)
    with patience.PatientSampling() as memory:
        ones(10)
    assert memory.peak == others + 40
