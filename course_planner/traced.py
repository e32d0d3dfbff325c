"""How long a traced step takes, as far as its FLOPs, its calls and its layout tell."""

from course_planner.descriptions import Hardware, Layout
from course_planner.fake import RECEIVED, Trace
from course_planner.networks import place_of_ranks
from course_planner.pipelining import bubble
from course_planner.timing import INSIDE, OUTSIDE, Calibration, call_seconds
from course_planner.traffic import Call
from course_utils.trace import on_a_ring

KINDS = INSIDE | dict.fromkeys(OUTSIDE, "data") | {"pp": "messages"}
OTHERS = "other groups"


def traced_seconds(
    trace: Trace, layout: Layout, hardware: Hardware, calibration: Calibration | None = None
) -> dict[str, float]:
    """The seconds of a traced step by kind, as if nothing went on beside anything else.

    "matrices" are all FLOPs, attention's too, at the share of the peak that large ones reach; calls
    by their groups, as `step_time` has them, with the ranks that they really have; "bubble" that of
    the layout's schedule, where stages send messages (`bubble`). So a real step lies between the largest and
    the sum, where launches, the memory's bandwidth and stragglers cost nothing; `step_time` has
    those, and needs the model's shape for it.
    """
    known = calibration or Calibration()
    parts = {"matrices": trace.flops / (hardware.peak * known.matrices)}
    for group, call in zip(trace.groups, trace.record.calls, strict=True):
        if call.op in RECEIVED or len(call.ranks) < 2:
            continue
        row = Call(group, call.op, 1, on_a_ring(call)[0], 0, "")
        place = place_of_ranks(call.ranks, hardware.node)
        kind = KINDS.get(group, OTHERS)
        parts[kind] = parts.get(kind, 0.0) + call_seconds(row, place, hardware, known)
    if "messages" in parts:  # a pipeline, whose stages wait while others work
        work = sum(parts.get(kind, 0.0) for kind in ("matrices", *INSIDE.values()))
        idle = bubble(layout.schedule, layout.pp, layout.micro_batches, chunks=layout.chunks)
        parts["bubble"] = work * idle / (1 - idle)
    return {kind: seconds for kind, seconds in parts.items() if seconds}
