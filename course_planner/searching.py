"""The layouts of a model on a cluster, from the quickest."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from course_planner.descriptions import RECOMPUTE, Hardware, Layout, Model, whole
from course_planner.memory import fits, fullest, tensors
from course_planner.timing import Calibration, StepTime, step_time

LONG_ENOUGH = 4096  # tokens that a context rank keeps at least
CHUNKS = (2, 3, 4, 5, 6, 8)
SPLIT = ("dp", "tp", "pp", "cp", "ep")

REASONS = {
    "heads": "The heads, KV heads or columns of the MLP cannot be split among the tensor ranks.",
    "layers": "There are too few layers for the stages, or they do not fill the chunks.",
    "sequence": "The sequence cannot be split among the tensor and context ranks.",
    "experts": "The experts cannot be shared out among the expert ranks.",
    "batch": "The global batch is no multiple of the data ranks.",
    "interleaving": "Interleaving needs a multiple of the stages as number of micro-batches.",
    "memory": "Its tensors need more than a GPU's memory.",
}


@dataclass(frozen=True)
class Plan:
    """A layout that is legal and fits: its time, the bytes of its fullest rank, what limits it."""

    layout: Layout
    time: StepTime
    memory: dict[str, int]

    @property
    def limit(self) -> str:
        return self.time.limit


def search(
    model: Model,
    gpus: int,
    global_batch: int,
    seq: int,
    hardware: Hardware,
    calibration: Calibration | None = None,
    keep: int = 10,
    progress: Callable[[], object] = lambda: None,
    allowed: Callable[[Layout], bool] = lambda layout: True,
) -> tuple[list[Plan], Counter[str]]:
    """The `keep` quickest layouts, and how many were rejected for which of REASONS.

    global_batch: sequences in a step. Tried are all sizes of groups that multiply to `gpus`, all
    micro-batches, the stages of ZeRO (`_shardings`), every schedule that a framework has, and every
    recomputation, of which `allowed` may leave some out. Tensor groups may leave the node: the network's time speaks
    against it. `progress` is called for each layout that is legal.
    """
    whole(gpus=gpus, global_batch=global_batch, seq=seq, keep=keep)
    rejected: Counter[str] = Counter()
    plans = []
    for layout in filter(allowed, _layouts(model, gpus, global_batch, seq, rejected)):
        progress()
        held = fullest(model, layout, seq)
        if not fits(held, hardware):
            rejected["memory"] += 1
            continue
        time = step_time(model, layout, seq, hardware, calibration)
        plans.append(Plan(layout, time, held))
    plans.sort(key=_order)
    return plans[:keep], rejected


def differing(plans: Sequence[Plan], keep: int) -> list[Plan]:
    """Of `plans`, the quickest of each split among the ranks; where these are fewer than `keep`, also of
    each ZeRO and recomputation. Chunks and micro-batches alone make no other plan."""
    chosen: list[Plan] = []
    for names in (SPLIT, (*SPLIT, "zero", "recompute")):
        best: dict[tuple, Plan] = {}
        for plan in sorted(plans, key=_order):
            best.setdefault(tuple(getattr(plan.layout, name) for name in names), plan)
        chosen += [plan for plan in best.values() if plan not in chosen]
    return sorted(chosen[:keep], key=_order)


def needs(
    model: Model,
    gpus: int,
    global_batch: int,
    seq: int,
    allowed: Callable[[Layout], bool] = lambda layout: True,
) -> list[tuple[dict[str, int], Layout]]:
    """What the fullest rank of each legal layout holds, whether it fits or not; from the leanest."""
    tried = filter(allowed, _layouts(model, gpus, global_batch, seq, Counter()))
    found = [(fullest(model, layout, seq), layout) for layout in tried]
    return sorted(found, key=lambda each: tensors(each[0]))


def _order(plan: Plan) -> tuple[float, int]:
    return plan.time.seconds, plan.memory["total"]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _layouts(
    model: Model, gpus: int, global_batch: int, seq: int, rejected: Counter[str]
) -> Iterator[Layout]:
    """All legal layouts; counts what is not legal."""
    for tp, cp, pp in product(_divisors(gpus), repeat=3):
        if gpus % (tp * cp * pp) or (cp > 1 and seq // cp < LONG_ENOUGH):
            continue
        dp = gpus // (tp * cp * pp)
        reason = _illegal(model, tp, cp, pp, seq) or ("batch" if global_batch % dp else None)
        if reason:
            rejected[reason] += 1
            continue
        yield from _runs(model, Layout(dp=dp, tp=tp, pp=pp, cp=cp), global_batch // dp, rejected)


def _illegal(model: Model, tp: int, cp: int, pp: int, seq: int) -> str | None:
    """Why the model cannot be split in this way, as a key of REASONS."""
    if model.heads % tp or model.ffn % tp or (model.kv_heads % tp and tp % model.kv_heads):
        return "heads"
    if pp > model.layers:
        return "layers"
    if seq % (tp * cp):
        return "sequence"
    return None


def _runs(model: Model, split: Layout, batch: int, rejected: Counter[str]) -> Iterator[Layout]:
    """How a step can run on such a split: experts, micro-batches, schedule, ZeRO, recomputation."""
    for ep in _experts(model, split, rejected):
        for micro_batch in _divisors(batch):
            micro_batches = batch // micro_batch
            for schedule, chunks in _schedules(model, split.pp, micro_batches, rejected):
                for (zero, reshard), recompute in product(_shardings(split), RECOMPUTE):
                    yield replace(
                        split,
                        ep=ep,
                        zero=zero,
                        micro_batch=micro_batch,
                        micro_batches=micro_batches,
                        chunks=chunks,
                        schedule=schedule,
                        recompute=recompute,
                        reshard=reshard,
                    )


def _experts(model: Model, split: Layout, rejected: Counter[str]) -> Iterator[int]:
    for ep in _divisors(split.shards) if model.experts else [1]:
        if max(model.experts, 1) % ep:
            rejected["experts"] += 1
        else:
            yield ep


def _schedules(
    model: Model, pp: int, micro_batches: int, rejected: Counter[str]
) -> Iterator[tuple[str, int]]:
    """Schedules, with chunks; Llama 3 fills them when its first and last have a layer less."""
    yield "1f1b", 1
    if pp == 1:
        return
    yield "zb-h1", 1
    for chunks in CHUNKS:
        short = -model.layers % (pp * chunks)
        if short not in (0, 2):
            rejected["layers"] += 1
        elif micro_batches % pp:
            rejected["interleaving"] += 1
        else:
            yield "interleaved", chunks


def _shardings(split: Layout) -> list[tuple[int, bool]]:
    """ZeRO's stage, and whether parameters are given up after a forward pass.

    Behind a pipeline they are not: each micro-batch would gather them again. Nor does stage 2 save
    anything there, whose gradients are whole until the last micro-batch; and stage 1 sends as much as 0.
    """
    if split.shards == 1:
        return [(0, True)]
    if split.pp > 1:
        return [(1, True), (3, False)]
    return [(0, True), (1, True), (2, True), (3, False), (3, True)]
