"""A process says where it is, also when a request for that has been lost."""

import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch

from course_utils.comm import intercept, serving
from course_utils.launch.keepers.janitor import Handle
from course_utils.launch.story import stacks, threads
from course_utils.launch.story.frames import Frame

context = multiprocessing.get_context("spawn")


def waits_for_long(pipe: Connection, ready: Connection) -> None:
    ready.send(stacks.answer_with_stacks(pipe))
    time.sleep(600)


@pytest.fixture
def waiting() -> Iterator[tuple]:
    """What `ask` wants of a process that waits: its pipe, how to send a signal, its main thread."""
    pipe, theirs = context.Pipe(duplex=False)
    ready, readies = context.Pipe(duplex=False)
    process = context.Process(target=waits_for_long, args=(theirs, readies))
    process.start()
    handle = Handle(process.pid)
    try:
        yield pipe, handle.send, ready.recv()
    finally:
        process.kill()
        process.join()
        handle.close()


def test_a_request_that_is_lost_is_made_again(waiting: tuple) -> None:
    pipe, send, main = waiting
    sent = []

    def first_is_lost(number: int) -> None:
        sent.append(number)
        if len(sent) > 1:
            send(number)

    (text,) = stacks.ask([(pipe, first_is_lost, main)])
    assert "in waits_for_long" in text
    assert len(sent) == 2


def test_nobody_waits_for_ever_for_an_answer(waiting: tuple) -> None:
    pipe, _, main = waiting
    assert stacks.ask([(pipe, lambda number: None, main)], patience=0.5) == [""]


def test_a_thread_that_carries_out_what_is_queued_is_told_from_one_that_may_call():
    busy, waits = Frame(torch.__file__, 1, "computes"), Frame(intercept.__file__, 1, "wait")

    def proven(*other: Frame) -> bool:
        both = SimpleNamespace(main_thread="main", threads={"main": [waits], "other": [*other]})
        return threads.rest(both, finished=False, handlers=False, lacks=False).proven

    assert not proven(busy)
    assert proven(busy, Frame(serving.__file__, 1, serving.serve.__name__))
