"""forbidden: a call is noticed under any name, in any thread, and nothing is left behind."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from torch.utils.data import DistributedSampler

from course_exercises.authoring.forbidden import called


def built_in(x):
    return x


def other(x):
    return x


def test_a_call_under_another_name_is_noted():
    renamed = built_in
    with called(built_in) as found:
        assert renamed(3) == 3
    assert found == ["built_in"]


def test_what_is_not_forbidden_is_not_noted():
    with called(built_in) as found:
        other(3)
    built_in(3)
    assert not found


def test_a_subclass_calls_the_method_of_its_parent():
    class Mine(DistributedSampler):
        pass

    with called(DistributedSampler.__init__) as found:
        Mine(range(4), num_replicas=2, rank=0)
    assert found == ["DistributedSampler.__init__"]


def test_a_call_in_a_thread_is_noted():
    with called(built_in) as found, ThreadPoolExecutor(1) as threads:
        threads.submit(built_in, 3).result()
    assert found == ["built_in"]


def test_the_profilers_of_before_are_back():
    before = sys.getprofile(), threading.getprofile()
    with called(built_in):
        assert sys.getprofile() is not None
    assert (sys.getprofile(), threading.getprofile()) == before
