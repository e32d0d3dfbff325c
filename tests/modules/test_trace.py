import pickle
import time
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from course_utils import launch as course_launch
from course_utils.comm.versions import older_than
from course_utils.hardware import device
from course_utils.lesson.models import MnistNet
from course_utils.trace import (
    Call,
    Record,
    Span,
    Trace,
    kept_for_backward,
    largest_tensor,
    memory_ledger,
    recording,
    ring_bytes,
    separate_waiting,
)
from tests.support.needing_rules import needs_rules
from tests.support.on_gloo import launch


def traced(rank, body):
    warnings.simplefilter("ignore", FutureWarning)
    with Trace() as trace:
        body(rank)
    return trace.record()


def run(body, nprocs=2):
    return launch(traced, nprocs, body)


def vector():
    return torch.ones(100)  # 400 bytes


def pieces(count):
    return [torch.ones(100) for _ in range(count)]


# gloo has it from 2.12 on
OF_LISTS = ("all_to_all", lambda r: dist.all_to_all(pieces(3), pieces(3)), [1200] * 3)

# op, what three ranks call, the bytes that each hands over
EVERY_CALL = [
    ("all_reduce", lambda r: dist.all_reduce(vector()), [400] * 3),
    ("all_reduce", lambda r: dist.all_reduce(vector().to(torch.bfloat16)), [200] * 3),
    ("all_reduce", lambda r: dist.all_reduce(torch.ones(100, dtype=torch.int64)), [800] * 3),
    ("reduce", lambda r: dist.reduce(vector(), 1), [400] * 3),
    ("broadcast", lambda r: dist.broadcast(vector(), 1), [0, 400, 0]),
    ("scatter", lambda r: dist.scatter(vector(), pieces(3) if r == 1 else None, 1), [0, 1200, 0]),
    ("gather", lambda r: dist.gather(vector(), pieces(3) if r == 1 else None, 1), [400] * 3),
    ("all_gather", lambda r: dist.all_gather(pieces(3), vector()), [400] * 3),
    ("all_gather", lambda r: dist.all_gather_into_tensor(torch.ones(300), vector()), [400] * 3),
    ("reduce_scatter", lambda r: dist.reduce_scatter(vector(), pieces(3)), [1200] * 3),
    (
        "reduce_scatter",
        lambda r: dist.reduce_scatter_tensor(vector(), torch.ones(300)),
        [1200] * 3,
    ),
    *([] if older_than("2.12") else [OF_LISTS]),
    (
        "all_to_all",
        lambda r: dist.all_to_all_single(torch.ones(300), torch.ones(300)),
        [1200] * 3,
    ),
    ("barrier", lambda r: dist.barrier(), [0] * 3),
]


def test_the_bytes_of_every_collective():
    def body(rank):
        for _, call, _ in EVERY_CALL:
            call(rank)

    records = run(body, 3)
    for record in records:
        assert [call.op for call in record.calls] == [op for op, _, _ in EVERY_CALL]
        sent = [call.bytes if call.sends else 0 for call in record.calls]
        assert sent == [bytes[record.rank] for _, _, bytes in EVERY_CALL]
        spans = [span for span in record.spans if span.kind == "communication"]
        assert [span.call for span in spans] == list(range(len(EVERY_CALL)))
        assert not any(span.background for span in spans)
        assert all(0 <= span.start < span.end for span in spans)


def test_sent_and_count():
    def body(rank):
        dist.all_reduce(vector())
        dist.all_reduce(torch.ones(3))
        dist.broadcast(vector(), 0)

    first, second = run(body)
    assert (first.count(), first.count("all_reduce"), first.count("send")) == (3, 2, 0)
    assert (first.sent(), first.sent("all_reduce"), first.sent("broadcast")) == (812, 412, 400)
    assert (second.sent(), second.sent("broadcast")) == (412, 0)
    assert second.calls[2] == Call("broadcast", 400, 100, "float32", False, (0, 1), 0)
    with pytest.raises(ValueError, match="no call named 'allreduce'; there are all_gather"):
        first.sent("allreduce")


def test_what_a_ring_sends():
    def three_of_four(rank):  # 1200 bytes each, whole or put together
        group = dist.new_group([0, 1, 2])
        with Trace() as trace:
            if rank < 3:
                dist.all_reduce(torch.ones(300), group=group)
                dist.all_gather(list(torch.empty(300).chunk(3)), torch.ones(100), group=group)
                dist.reduce_scatter(torch.empty(100), list(torch.ones(300).chunk(3)), group=group)
        return trace.record().calls

    calls = launch(three_of_four, 4)[0]
    assert [ring_bytes([call]) for call in calls] == [1600, 800, 800]
    assert ring_bytes(calls) == 3200
    with pytest.raises(ValueError, match="broadcast on a ring"):
        ring_bytes([Call("broadcast", 8, 2, "float32", ranks=(0, 1))])


def test_messages():
    def body(rank):
        if rank == 0:
            dist.send(vector(), 1)
            dist.isend(vector(), 1).wait()
        else:
            dist.recv(vector(), 0)
            dist.irecv(vector(), 0).wait()
        ops = [dist.P2POp(dist.isend, vector(), 1 - rank)]
        ops.append(dist.P2POp(dist.irecv, vector(), 1 - rank))
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    first, second = run(body)
    assert [call.op for call in first.calls] == ["send", "send", "send", "recv"]
    assert [call.op for call in second.calls] == ["recv", "recv", "send", "recv"]
    assert (first.sent("send"), second.sent("send")) == (1200, 400)
    assert first.sent("recv") == second.sent("recv") == 0
    assert first.calls[3].bytes == 400 and first.calls[3].ranks == (1, 0)
    background = [span.background for span in first.spans if span.kind == "communication"]
    assert background == [False, True, True, True]


def test_asynchronous_calls_run_in_the_background_and_waiting_is_what_wait_takes():
    def body(rank):
        work = dist.all_reduce(vector(), async_op=True)
        if rank == 1:
            time.sleep(0.2)
        work.wait()

    for record in run(body):
        (call,) = [span for span in record.spans if span.kind == "communication"]
        (wait,) = [span for span in record.spans if span.kind == "waiting"]
        assert call.background and not wait.background and wait.name == "wait"
        assert call.start < wait.start <= wait.end


def test_work_that_nobody_waits_for_ends_with_the_trace():
    def body(rank):
        dist.all_reduce(vector(), async_op=True)
        if rank == 0:
            dist.irecv(vector(), 1)
        else:
            sent.append(dist.isend(vector(), 0))

    sent = []  # gloo may forget a message that nobody keeps
    for record, op in zip(run(body), ("recv", "send")):
        assert [call.op for call in record.calls] == ["all_reduce", op]
        assert all(span.end >= span.start for span in record.spans)


def test_what_ddp_reduces_by_itself_is_recorded():
    def body(rank):
        model = DistributedDataParallel(MnistNet())
        with Trace() as trace:
            with trace.span("backward"):
                model(torch.rand(4, 784)).sum().backward()
            with torch.no_grad(), model.no_sync():
                model(torch.rand(4, 784))
        return trace.record()

    for record in launch(body, 2):
        assert record.sent("all_reduce") == 39_760 * 4
        spans = [span for span in record.spans if span.kind == "communication"]
        backward = [span for span in record.spans if span.name == "backward"]
        assert all(span.background for span in spans)
        assert all(backward[0].start < span.start < backward[-1].end for span in spans)


def test_the_reducers_wait_is_no_computing():
    def body(rank):
        layers = [nn.Linear(512, 512, bias=False) for _ in range(4)]
        model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=100)
        for _ in range(2):  # after the first step the reducer lays out its buckets anew
            model(torch.rand(8, 512)).sum().backward()
        with Trace() as trace:
            loss = model(torch.rand(8, 512)).sum()
            time.sleep(0.5 * rank)
            with trace.span("backward"):
                loss.backward()
        return trace.record()

    first, second = launch(body, 2)
    (call,) = [span for span in first.spans if span.background]
    waits = [span for span in first.spans if span.kind == "waiting"]
    assert first.seconds("waiting") > 0.3, "one bucket: all of it is sent after the last gradient"
    assert all(span.end <= call.end for span in waits)
    assert second.seconds("waiting") < first.seconds("waiting")
    assert first.seconds("compute") < first.seconds("waiting")


def test_calls_that_do_not_come_from_the_functions_of_torch_distributed():
    def body(rank):
        functional.wait_tensor(functional.all_reduce(vector(), "sum", dist.group.WORLD))
        with torch.inference_mode():
            dist.all_reduce(torch.ones(50))

    for record in run(body):
        assert record.sent("all_reduce") == 600


def test_groups_are_told_apart_by_their_ranks():
    def body(rank):
        group = dist.new_group([0, 2])
        with Trace() as trace:
            if rank != 1:
                dist.broadcast(vector(), group_src=1, group=group)
        return trace.record()

    first, second, third = launch(body, 3)
    assert second.calls == []
    assert first.calls[0].ranks == third.calls[0].ranks == (0, 2)
    assert first.calls[0].root == 2
    assert (first.sent(), third.sent()) == (0, 400)


def test_spans_share_one_clock_and_are_cut_where_others_run():
    def body(rank):
        with Trace() as trace:
            time.sleep(0.05 * rank)
            with trace.span("forward"):
                time.sleep(0.01)
                dist.all_reduce(vector())
                time.sleep(0.01)
        return trace.record()

    records = launch(body, 2)
    for record in records:
        assert [span.name for span in record.spans] == ["forward", "all_reduce", "forward"]
        for one, next_one in zip(record.spans, record.spans[1:]):
            assert one.end == next_one.start
        assert record.seconds("compute") >= 0.02
    first, second = separate_waiting(records)
    assert [s.kind for s in first.spans] == ["compute", "waiting", "communication", "compute"]
    assert [s.kind for s in second.spans] == ["compute", "communication", "compute"]
    # rank 0's transfer begins at the moment at which rank 1 enters the call
    assert first.spans[2].start == second.spans[1].start
    assert first.seconds("waiting") > 0.03


# ---- on a device whose calls return at once: NCCL's, or its rules on the CPU ---------------------

LATE = 0.3  # seconds that rank 1 comes late


def on_device(body):
    return course_launch.launch(traced_on_device, 2, body, rules="nccl")


def traced_on_device(rank, body):
    x = torch.ones(4, 4, device=device())
    dist.all_reduce(x)  # the ranks are connected
    with Trace() as trace:
        time.sleep(LATE * rank)
        body(rank, trace, x)
    return trace.record()


@needs_rules
def test_a_span_begins_when_the_device_gets_there():
    def body(rank, trace, x):
        dist.send(x, 0) if rank else dist.recv(x, 1)  # returns at once
        with trace.span("forward"):
            x @ x

    record = on_device(body)[0]
    [message] = [span for span in record.spans if span.name == "recv"]
    [forward] = [span for span in record.spans if span.name == "forward"]
    assert message.end - message.start > LATE / 2
    assert forward.start >= message.end and forward.end - forward.start < LATE / 2


@needs_rules
def test_the_messages_of_a_batch_last_until_it_ends():
    def body(rank, trace, x):
        ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, x.clone(), 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    record = on_device(body)[0]
    messages = [span for span in record.spans if span.kind == "communication"]
    assert [span.name for span in messages] == ["send", "recv"]
    assert all(span.end - span.start > LATE / 2 for span in messages)


@needs_rules
def test_what_ddp_reduces_in_autograds_own_thread_is_recorded():
    """A device has a thread of autograd's, in which no line of Python's has made the call."""

    def body(rank, trace, x):
        model = DistributedDataParallel(nn.Linear(4, 4, bias=False).to(device()))
        with trace.span("backward"):
            model(x).sum().backward()

    for record in on_device(body):
        [reduced] = [span for span in record.spans if span.name == "all_reduce"]
        assert reduced.background and record.sent("all_reduce") == 4 * 4 * 4
        [backward] = [span for span in record.spans if span.name == "backward"][:1]
        assert backward.start < reduced.start


def test_a_thread_of_the_backend_does_not_wait_for_the_device(monkeypatch):
    """It tells of the end of a call; where it waited, the device would wait for what waits for it."""
    settled = []
    monkeypatch.setattr(recording.hardware, "settle", lambda: settled.append("settled"))
    clock = recording._DevicesClock(0.0)
    clock.news()
    assert settled == []
    clock.mark()
    assert settled == ["settled"]


def test_all_ranks_have_the_same_zero():
    def body(rank):
        barrier = dist.barrier

        def leaves_late():
            barrier()
            time.sleep(0.05 * rank)

        dist.barrier = leaves_late
        with Trace() as trace:
            before = []
            for _ in range(20):
                before.append(time.perf_counter())
                with trace.span("forward"):
                    pass
        return max(b - span.start for b, span in zip(before, trace.record().spans))

    first, second = launch(body, 2)
    assert abs(first - second) < 0.01


def test_a_blocking_call_without_a_work_ends_when_it_returns():
    """NCCL's blocking calls have no Work to wait for; gloo's have, so one is taken away here."""

    def body(rank):
        with Trace() as trace:
            arguments = {"tensors": [vector()], "process_group": dist.group.WORLD.boxed()}
            started = trace._recorder._on_call("allreduce_", arguments | {"async_op": False})
            started((arguments["tensors"], None))
            time.sleep(0.05)
        return trace.record()

    (record,) = launch(body, 1)
    (span,) = record.spans
    assert not span.background and span.end - span.start < 0.04


def by_hand(rank, op, start, end, root=None, ranks=(0, 1)):
    span = Span(op, "communication", start, end, False, 0)
    return Record(rank, [span], [Call(op, 4, 1, "float32", True, ranks, root)])


def kinds(record):
    return [(span.kind, span.start, span.end) for span in record.spans]


@pytest.mark.parametrize(
    ("op", "root", "late", "expected"),
    [
        # the last to come is waited for, by everybody
        ("all_reduce", None, 1, [("waiting", 0, 5), ("communication", 5, 6)]),
        # the root of a broadcast waits for nobody who comes after it has gone
        ("broadcast", 0, 1, [("communication", 0, 1)]),
        # the others wait for the root
        ("broadcast", 1, 1, [("waiting", 0, 5), ("communication", 5, 6)]),
        ("gather", 0, 1, [("waiting", 0, 5), ("communication", 5, 6)]),
    ],
)
def test_waiting_is_for_the_ranks_that_a_call_needs(op, root, late, expected):
    records = [by_hand(0, op, 0, expected[-1][2], root), by_hand(1, op, 5, 6, root)]
    first, second = separate_waiting(records)
    assert kinds(first) == expected
    assert kinds(second) == [("communication", 5, 6)]


def test_a_receiver_of_a_broadcast_waits_for_the_root_only():
    records = [
        by_hand(rank, "broadcast", start, 6, root=0, ranks=(0, 1, 2))
        for rank, start in enumerate((1, 0, 5))
    ]
    _, second, _ = separate_waiting(records)
    assert kinds(second) == [("waiting", 0, 1), ("communication", 1, 6)]


def test_a_call_without_its_partners_record_stays_as_it_is():
    record = by_hand(0, "all_reduce", 0, 6)
    assert separate_waiting([record]) == [record]


def test_a_trace_in_one_process():
    with Trace() as trace:
        with pytest.raises(RuntimeError, match="when the `with Trace"):
            trace.record()
        with trace.span("outer"), trace.span("inner"):
            time.sleep(0.01)
    record = trace.record()
    assert record.rank == 0 and record.calls == []
    assert "inner" in [span.name for span in record.spans]
    assert pickle.loads(pickle.dumps(record)) == record


def test_one_trace_at_a_time_and_nothing_is_left_behind():
    with Trace():
        pass
    wait = dist.Work.wait
    with Trace(), pytest.raises(RuntimeError, match="open in this process already"), Trace():
        pass
    assert dist.Work.wait is wait
    with pytest.raises(KeyError), Trace():
        raise KeyError
    assert dist.Work.wait is wait

    def body(rank):
        with Trace() as first:
            dist.all_reduce(vector())
        dist.all_reduce(vector())
        with Trace() as second:
            dist.all_reduce(torch.ones(1))
        return first.record().sent(), second.record().sent()

    assert launch(body, 2) == [(400, 4)] * 2


def test_memory_ledger():
    model = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10), nn.Linear(10, 10))
    model[2].weight = model[0].weight  # tied: one tensor
    numbers = 100 + 10 + 20 + 10
    buffers = 2 * 10 * 4 + 8
    optimizer = torch.optim.Adam(model.parameters())
    empty = {"parameters": numbers * 4, "gradients": 0, "optimizer": 0, "buffers": buffers}
    assert memory_ledger(model) == memory_ledger(model, optimizer) == empty
    model(torch.rand(4, 10)).sum().backward()
    optimizer.step()
    steps = 5 * 4  # Adam counts its steps in one float32 per parameter
    assert memory_ledger(model, optimizer) == {
        "parameters": numbers * 4,
        "gradients": numbers * 4,
        "optimizer": 2 * numbers * 4 + steps,
        "buffers": buffers,
    }


def test_memory_ledger_counts_the_part_of_a_dtensor_that_this_rank_holds():
    def body(rank):
        model = nn.Linear(10, 5, bias=False)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.rand(4, 10)).sum().backward()
        optimizer.step()
        return memory_ledger(model, optimizer)

    for rank, ledger in enumerate(launch(body, 2)):
        rows = (3, 2)[rank]  # of five
        held = dict.fromkeys(("parameters", "gradients", "optimizer"), rows * 10 * 4)
        assert ledger == held | {"buffers": 0}


def test_kept_for_backward_counts_each_storage_once_and_no_parameter():
    model = nn.Sequential(nn.Linear(10, 6), nn.ReLU(), nn.Linear(6, 3))
    images = torch.rand(4, 10)
    with kept_for_backward(model) as kept:
        model(images)
    # the images for the first layer; the ReLU's result for the ReLU and for the last layer
    assert kept.bytes == 4 * (4 * 10 + 4 * 6)


def test_kept_for_backward_keeps_nothing_without_a_graph():
    model = nn.Linear(10, 6)
    with kept_for_backward(model) as kept, torch.no_grad():
        model(torch.rand(4, 10))
    assert kept.bytes == 0


def test_kept_for_backward_counts_the_same_with_fsdp_as_without():
    """The parameters that it gathers are no activations, and it frees them."""

    def body(rank):
        model = nn.Sequential(nn.Linear(10, 6), nn.ReLU(), nn.Linear(6, 3))
        counts = []
        for prepare in (lambda: None, lambda: [fully_shard(layer) for layer in model[::2]]):
            prepare()
            with kept_for_backward(model) as kept:
                model(torch.rand(4, 10))
            counts.append(kept.bytes)
        return counts

    assert launch(body, 2) == [[4 * (4 * 10 + 4 * 6)] * 2] * 2


def test_kept_for_backward_counts_a_ranks_part_of_an_activation():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        rows = DTensor.from_local(torch.rand(3, 4, requires_grad=True), mesh, [Shard(0)])
        with kept_for_backward(nn.Identity()) as kept:
            squares = rows.square()  # keeps 3 rows
            squares.full_tensor().square()  # keeps all 6
        return kept.bytes

    assert launch(body, 2) == [4 * (3 * 4 + 6 * 4)] * 2


def test_the_largest_tensor_is_that_of_one_operation():
    a = torch.ones(10, 4)
    with largest_tensor() as largest:
        (a @ a.T).sum()
        torch.cat([a, a])
    torch.ones(1000)  # after the block
    assert largest.bytes == 10 * 10 * 4


def test_the_largest_tensor_is_seen_inside_an_autograd_function():
    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return (a.unsqueeze(1) * a).sum(1)

    with largest_tensor() as largest:
        Outer.apply(torch.ones(8, requires_grad=True))
    assert largest.bytes == 8 * 8 * 4
