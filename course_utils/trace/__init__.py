"""What a rank did and when: compute, communication and waiting, and the bytes it handed over.

    with Trace() as trace:
        with trace.span("forward"):
            loss = loss_function(model(images), labels)
        dist.all_reduce(loss)
    record = trace.record()

Every collective and every message of this process is recorded, whoever starts it: the functions
of torch.distributed, DistributedDataParallel's C++ reducer, FSDP, DTensor. Bytes are exact. They
are the payload: what this rank hands to the call, which does not depend on how a backend moves it.

    op                                    handed over by a rank
    all_reduce, reduce, gather,           its tensor
      all_gather
    reduce_scatter, all_to_all            its whole input: all the pieces together
    broadcast, scatter                    the root its whole input; the others nothing
    send                                  its tensor (isend and batch_isend_irecv too)
    recv, barrier                         nothing

Times are seconds since the common start of all ranks. On the CPU they are `time.perf_counter`,
which all processes of one machine share. With NCCL they are CUDA events, so that a span covers
the work on the GPU and not the moment at which Python asked for it.

    calls        what a collective or a message hands over
    records      what one rank did, and what the records of all ranks say together
    recording    how it is seen
    ledger       the bytes that a process holds
"""

from course_utils.trace.calls import Call, describe, on_a_ring, ring_bytes
from course_utils.trace.ledger import kept_for_backward, largest_tensor, memory_ledger
from course_utils.trace.recording import Trace
from course_utils.trace.records import Record, Span, separate_waiting

__all__ = [
    "Call",
    "Record",
    "Span",
    "Trace",
    "describe",
    "kept_for_backward",
    "largest_tensor",
    "memory_ledger",
    "on_a_ring",
    "ring_bytes",
    "separate_waiting",
]
