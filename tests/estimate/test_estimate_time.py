"""How long a step takes, and the search: sums, limits, sentences of errors, regret."""

import itertools
import math
from dataclasses import replace

import psutil
import pytest

import course_planner as estimate
from course_planner import (
    Calibration,
    Hardware,
    Layout,
    Model,
    here,
    published,
    searching,
    timing,
)
from course_planner.networks import Place, place_of
from tests.benchmarks import bench_plans

MODEL = Model(8, 1024, 16, 32000, ffn=4096)
SEQ = 2048
SMALL = Hardware(100e12, 16 * 10**9, 1e12, 4, 100e9, 5e-6, 10e9, 1e-5)
QUICK = replace(SMALL, intra_bandwidth=1e18, inter_bandwidth=1e18, hbm_bandwidth=1e18)
PIPELINES = [
    Layout(dp=2, tp=2, pp=2, micro_batches=4, schedule=schedule, chunks=chunks, zero=zero)
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1))
    for zero in (0, 3)
]


def seconds(layout: Layout, hardware: Hardware = SMALL, model: Model = MODEL) -> float:
    return estimate.step_time(model, layout, SEQ, hardware).seconds


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=4, zero=3, cp=2), *PIPELINES])
def test_the_parts_of_a_step_add_up_and_the_largest_limits(layout):
    time = estimate.step_time(MODEL, layout, SEQ, SMALL)
    assert sum(time.parts.values()) == pytest.approx(time.seconds, rel=1e-12)
    assert min(time.parts.values()) > 0
    assert time.parts[time.limit] == max(time.parts.values())
    assert time.low < time.seconds < time.high


def test_a_step_takes_no_less_than_its_flops_at_the_peak():
    for layout in (Layout(), *PIPELINES):
        tokens = layout.sequences() * SEQ
        flops = estimate.flops(MODEL, SEQ, tokens)
        assert seconds(layout) > flops / layout.gpus / SMALL.peak


def test_twice_the_peak_halves_the_matrices_alone():
    layout = Layout(dp=2, tp=2, pp=2, micro_batches=4)
    once = estimate.step_time(MODEL, layout, SEQ, SMALL).parts
    twice = estimate.step_time(MODEL, layout, SEQ, replace(SMALL, peak=2 * SMALL.peak)).parts
    assert twice["matrices"] == pytest.approx(once["matrices"] / 2)
    assert twice["tensor"] == pytest.approx(once["tensor"])
    assert twice["messages"] == pytest.approx(once["messages"])


@pytest.mark.parametrize(
    ("layout", "hardware", "limit"),
    [
        (Layout(micro_batch=8), replace(QUICK, hbm_bandwidth=1e13), "matrices"),
        (Layout(micro_batch=8), replace(SMALL, peak=1e18, hbm_bandwidth=1e10), "memory"),
        (Layout(tp=8, micro_batch=8), replace(SMALL, inter_bandwidth=1e8), "tensor"),
        (Layout(dp=8), replace(SMALL, inter_bandwidth=1e8), "data"),
        (Layout(pp=8, micro_batches=8), replace(SMALL, inter_bandwidth=1e7), "messages"),
        (Layout(pp=8, micro_batches=1), QUICK, "bubble"),
        (Layout(), replace(QUICK, peak=1e18), "launch"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_limits_is_what_is_slow(layout, hardware, limit):
    assert estimate.step_time(MODEL, layout, SEQ, hardware).limit == limit


def test_more_micro_batches_shrink_the_bubble_and_zero_bubble_is_below_1f1b():
    def share(**more) -> float:
        layout = Layout(pp=4, **more)
        time = estimate.step_time(MODEL, layout, SEQ, QUICK)
        return time.parts["bubble"] / time.seconds

    assert share(micro_batches=32) < share(micro_batches=8) < share(micro_batches=4)
    assert share(micro_batches=8, schedule="zb-h1") < share(micro_batches=8)


def test_a_tensor_group_that_leaves_its_node_is_slower():
    assert seconds(Layout(tp=8), SMALL) > seconds(Layout(tp=8), replace(SMALL, node=8))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"peak": 312.0}, r"peak is in FLOP/s, and 312\.0 is too little"),
        ({"hbm_bytes": 80}, r"hbm_bytes is in B, and 80 is too little"),
        ({"inter_bandwidth": 25.0}, r"inter_bandwidth is in B/s, and 25\.0 is too little"),
        ({"inter_latency": 5.0}, r"inter_latency is in seconds, and 5\.0 is none of a network"),
        ({"node": 0}, r"node is a whole number of at least 1, not 0"),
    ],
)
def test_a_wrong_unit_is_named(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(SMALL, **change)


def test_a_layout_that_the_model_does_not_allow_is_named():
    with pytest.raises(ValueError, match="16 heads cannot be split among 3 tensor ranks"):
        estimate.step_time(MODEL, Layout(tp=3), SEQ, SMALL)
    with pytest.raises(ValueError, match="8 layers cannot fill 16 stages"):
        estimate.step_time(MODEL, Layout(pp=16), SEQ, SMALL)


def test_calibrating_with_nothing_is_refused():
    with pytest.raises(ValueError, match="There is no row to calibrate with"):
        estimate.calibrate([], SMALL)


def test_calibrating_comes_near_to_rows_that_the_model_itself_made():
    made = estimate.Calibration(matrices=0.5, intra=0.5)
    layouts = [
        Layout(tp=tp, dp=dp, micro_batch=size)
        for tp, dp, size in itertools.product((1, 2, 4), (1, 2), (1, 8))
    ]
    rows = [
        estimate.Row(MODEL, at, SEQ, estimate.step_time(MODEL, at, SEQ, SMALL, made).seconds)
        for at in layouts
    ]
    found = estimate.calibrate(rows, SMALL)
    assert found == estimate.calibrate(rows, SMALL)
    for row in rows:
        again = estimate.step_time(MODEL, row.layout, SEQ, SMALL, found).seconds
        assert again == pytest.approx(row.seconds, rel=0.03)
        assert seconds(row.layout) < 0.9 * row.seconds  # the defaults are far off


@pytest.mark.parametrize("paper", published.HARDWARE)
def test_every_published_row_is_a_legal_layout(paper):
    rows = published.rows(paper)
    assert rows and len({row.name for row in rows}) == len(rows)
    for row in rows:
        time = estimate.step_time(
            row.model, row.layout, row.seq, row.hardware or published.HARDWARE[paper]
        )
        assert row.seconds > 0 and math.isfinite(time.seconds)


@pytest.mark.parametrize("paper", ["Megatron SC21", "Korthikanti", "zero bubble", "torchtitan"])
def test_rows_left_out_are_predicted_within_the_bound_and_better_than_by_one_rate(paper):
    judged = bench_plans.judge(paper)
    error = judged.error(judged.left_out)
    assert error <= bench_plans.BOUNDS[paper]
    assert error < judged.error(judged.null) / 2


# The search, against every layout there is.


def test_search_gives_legal_plans_that_fit_from_the_quickest():
    plans, rejected = estimate.search(MODEL, 8, 32, SEQ, SMALL, keep=20)
    assert len(plans) == 20
    times = [plan.time.seconds for plan in plans]
    assert times == sorted(times)
    for plan in plans:
        plan.layout.check(MODEL, SEQ)
        assert plan.layout.gpus == 8 and plan.layout.sequences() == 32
        assert plan.memory["total"] <= searching.room(SMALL)
        assert plan.limit == plan.time.limit
    assert set(rejected) <= set(estimate.REASONS) and min(rejected.values()) > 0


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("heads", {"model": replace(MODEL, heads=4, kv_heads=4)}),
        ("heads", {"model": replace(MODEL, width=1152, heads=24, kv_heads=3)}),
        ("heads", {"model": replace(MODEL, ffn=4100)}),
        ("layers", {"model": replace(MODEL, layers=5)}),
        ("sequence", {"seq": 2044, "model": MODEL}),
        ("batch", {"global_batch": 12}),
        ("interleaving", {"global_batch": 12}),
        ("memory", {"hardware": replace(SMALL, hbm_bytes=10**9)}),
        ("experts", {"model": replace(MODEL, experts=6, top_k=2)}),
    ],
)
def test_search_says_why_it_rejected(reason, change):
    asked = {"model": MODEL, "gpus": 8, "global_batch": 32, "seq": SEQ, "hardware": SMALL}
    usual = estimate.search(**asked)[1][reason]
    assert estimate.search(**asked | change)[1][reason] > usual


def every_layout(gpus: int, batch: int):
    """Every layout of `gpus` with `batch` sequences, without the search's own enumeration."""
    sizes = [1, 2, 4, 8]
    for dp, tp, pp, micro_batch, zero, (schedule, chunks), recompute in itertools.product(
        sizes,
        sizes,
        sizes,
        sizes,
        (0, 1, 3),
        (("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 4)),
        ("none", "selective", "full"),
    ):
        if dp * tp * pp != gpus or batch % (dp * micro_batch):
            continue
        m = batch // dp // micro_batch
        if schedule == "interleaved" and (m % pp or 8 % (pp * chunks)):
            continue
        shape = {"dp": dp, "tp": tp, "pp": pp, "micro_batch": micro_batch, "micro_batches": m}
        yield Layout(**shape, zero=zero, schedule=schedule, chunks=chunks, recompute=recompute)


@pytest.mark.parametrize("room", [2, 4, 16])
def test_search_finds_nearly_the_best_of_all_layouts(room):
    hardware = replace(SMALL, hbm_bytes=room * 10**9)
    best = math.inf
    for layout in every_layout(8, 32):
        stages = {0, layout.pp - 1}
        held = max(estimate.memory(MODEL, layout, SEQ, stage)["total"] for stage in stages)
        if held <= 0.9 * hardware.hbm_bytes:
            best = min(best, seconds(layout, hardware))
    plans, _ = estimate.search(MODEL, 8, 32, SEQ, hardware)
    assert plans[0].time.seconds <= 1.02 * best


@pytest.mark.parametrize("layers", [8, 14, 13])
def test_no_stage_of_a_plan_needs_more_than_the_plan_says(layers):
    """14 layers on 8 stages are one at each end and two between, so that the second is fullest."""
    model = replace(MODEL, layers=layers)
    plans, _ = estimate.search(model, 8, 32, SEQ, SMALL, keep=10**6)
    inside = 0
    for plan in plans:
        stages = range(plan.layout.pp)
        held = [estimate.memory(model, plan.layout, SEQ, stage)["total"] for stage in stages]
        assert plan.memory["total"] == max(held)
        inside += max(held) > max(held[0], held[-1])
    assert (inside > 0) == (layers != 8)


@pytest.mark.parametrize(("layers", "inside"), [(8, False), (14, True)])
def test_what_comes_once_a_step_takes_as_long_as_on_the_slowest_stage(layers, inside):
    """With large experts it is a stage between the ends that has most to update and to send."""
    model = Model(layers, 1024, 16, 32000, experts=8, top_k=2, tied=False)
    hardware, known = replace(SMALL, hbm_bytes=10**12), Calibration(overlap=0.0)
    plans, _ = estimate.search(model, 8, 32, SEQ, hardware, known, keep=10**6)
    slowest = set()
    for layout in (plan.layout for plan in plans if plan.layout.pp > 2):
        parts = estimate.step_time(model, layout, SEQ, hardware, known).parts
        by_stage = [once(model, layout, hardware, known, stage) for stage in range(layout.pp)]
        assert parts.get("data", 0.0) + parts["optimizer"] == pytest.approx(max(by_stage))
        slowest.add(max(by_stage) > 1.05 * max(by_stage[0], by_stage[-1]))
    assert slowest == {inside, False}


def once(model, layout, hardware, known, stage):
    """Seconds that a stage takes once a step, if nothing hides them: its optimizer, and its calls
    beside the layers."""
    sent = [
        timing.call_seconds(call, place_of(call.group, layout, hardware.node), hardware, known)
        for call in estimate.traffic(model, layout, SEQ, stage)
        if call.group in timing.OUTSIDE
    ]
    held = estimate.memory(model, layout, SEQ, stage)["optimizer"] / 12
    return sum(sent) + timing.OPTIMIZER_BYTES * held / hardware.hbm_bandwidth


def every_legal_layout(model: Model, gpus: int, batch: int, seq: int):
    """What `search` says that it tries, by `Layout.check`."""
    schedules = [("1f1b", 1), ("zb-h1", 1), *(("interleaved", c) for c in (2, 3, 4, 5, 6, 8))]
    sizes = itertools.product(range(1, gpus + 1), repeat=5)
    runs = list(itertools.product(range(1, batch + 1), schedules, ("none", "selective", "full")))
    for (dp, tp, pp, cp, ep), (micro_batch, (schedule, chunks), recompute) in itertools.product(
        [s for s in sizes if math.prod(s[:4]) == gpus and s[0] * s[3] % s[4] == 0], runs
    ):
        m, left = divmod(batch, dp * micro_batch)
        pieces = pp * chunks
        if left or (cp > 1 and seq // cp < 4096) or (ep > 1 and not model.experts):
            continue
        if schedule != "1f1b" and pp == 1:
            continue
        if schedule == "interleaved" and (m % pp or model.layers % pieces not in (0, pieces - 2)):
            continue
        ways = [(1, True), (3, False)] if dp * cp > 1 else [(0, True)]
        if pp == 1 < dp * cp:
            ways += [(0, True), (2, True), (3, True)]
        for zero, reshard in ways:
            shape = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "chunks": chunks}
            how = {"schedule": schedule, "recompute": recompute, "zero": zero, "reshard": reshard}
            layout = Layout(**shape, **how, micro_batch=micro_batch, micro_batches=m)
            try:
                layout.check(model, seq)
            except ValueError:
                continue
            yield layout


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "seq"),
    [
        (MODEL, 8, 32, SEQ),
        (replace(MODEL, layers=6), 4, 4, 8192),
        (MODEL, 4, 4, 8194),
        (replace(MODEL, layers=7, experts=4, top_k=2), 4, 6, 8192),
        (replace(MODEL, heads=8, kv_heads=2, ffn=4100), 8, 16, 1028),
    ],
)
def test_search_tries_every_layout_that_it_names_and_no_other(model, gpus, batch, seq):
    roomy = replace(SMALL, hbm_bytes=10**15)
    plans, _ = estimate.search(model, gpus, batch, seq, roomy, keep=10**6)
    tried = [plan.layout for plan in plans]
    assert set(tried) == set(every_legal_layout(model, gpus, batch, seq))
    assert len(tried) == len(set(tried))


def test_a_plan_may_fill_nine_tenths_of_a_gpu():
    roomy = replace(SMALL, hbm_bytes=10**15)
    best = estimate.search(MODEL, 8, 32, SEQ, roomy, keep=1)[0][0]
    for share, fits in ((0.895, True), (0.905, False)):
        tight = replace(SMALL, hbm_bytes=int(best.memory["total"] / share))
        found = estimate.search(MODEL, 8, 32, SEQ, tight, keep=10**6)[0]
        assert (best.layout in [plan.layout for plan in found]) == fits


def test_plans_that_differ_are_of_different_splits_as_far_as_there_are_such():
    def split(plan):
        return tuple(getattr(plan.layout, name) for name in ("dp", "tp", "pp", "cp", "ep"))

    plans, _ = estimate.search(MODEL, 8, 32, SEQ, SMALL, keep=10**6)
    shown = searching.differing(plans, 5)
    assert shown[0] == plans[0] and len(set(map(split, shown))) == 5
    for plan in shown:
        assert plan == next(other for other in plans if split(other) == split(plan))
    alone = [plan for plan in plans if split(plan) == split(plans[0])]
    ways = [(plan.layout.zero, plan.layout.recompute) for plan in searching.differing(alone, 5)]
    assert len(set(ways)) == len(ways) == 5


def test_a_search_may_be_restricted():
    plans, _ = estimate.search(
        MODEL, 8, 32, SEQ, SMALL, keep=10**6, allowed=lambda layout: layout.tp == 2
    )
    every, _ = estimate.search(MODEL, 8, 32, SEQ, SMALL, keep=10**6)
    assert plans == [plan for plan in every if plan.layout.tp == 2] != []


def test_what_layouts_need_is_told_whether_they_fit_or_not():
    roomy = replace(SMALL, hbm_bytes=10**15)
    plans, _ = estimate.search(MODEL, 8, 32, SEQ, roomy, keep=10**6)
    tried = searching.needs(MODEL, 8, 32, SEQ)
    assert {layout for _, layout in tried} == {plan.layout for plan in plans}
    sizes = [held["total"] for held, _ in tried]
    assert sizes == sorted(plan.memory["total"] for plan in plans)
    assert searching.needs(replace(MODEL, layers=1), 2, 1, SEQ + 1) == []


def test_what_is_rejected_is_counted():
    """One layer and one sequence on two GPUs: data ranks have too few sequences, stages no layer."""
    tiny = replace(MODEL, layers=1)
    plans, rejected = estimate.search(tiny, 2, 1, 2 * SEQ, SMALL, keep=10**6)
    assert {plan.layout.tp for plan in plans} == {2}
    assert rejected == {"batch": 1, "layers": 1}
    full, rejected = estimate.search(tiny, 2, 1, SEQ, replace(SMALL, hbm_bytes=10**6))
    assert full == [] and rejected == {"batch": 1, "layers": 1, "memory": len(plans)}
    plans, rejected = estimate.search(tiny, 1, 3, SEQ, SMALL)
    assert {plan.layout.micro_batch for plan in plans} == {1, 3} and not rejected


def test_calibrating_begins_where_it_is_told():
    """Rows that the start itself made leave all constants where they are."""
    start = estimate.Calibration(matrices=0.3, size=1e7, launch=3e-4, intra=0.9)
    layout = Layout(tp=2, micro_batch=4)
    seconds = estimate.step_time(MODEL, layout, SEQ, SMALL, start).seconds
    found = estimate.calibrate([estimate.Row(MODEL, layout, SEQ, seconds)], SMALL, start)
    for name in ("matrices", "size", "launch", "intra", "slowdown"):
        assert getattr(found, name) == pytest.approx(getattr(start, name), rel=1e-3)


def test_this_machine_is_hardware_to_estimate_with():
    """All measured, so that no number is known beforehand, but for who shares what."""
    found = here.this_machine(2)
    assert found.node == 2
    assert 2 * found.hbm_bytes == pytest.approx(psutil.virtual_memory().total, abs=2)
    assert found.inter_bandwidth == found.intra_bandwidth
    assert found.inter_latency == found.intra_latency > 0
    time = estimate.step_time(MODEL, Layout(tp=2), SEQ, found, here.CPU)
    assert time.parts["tensor"] > 0


def test_an_all_to_all_between_nodes_takes_as_long_as_the_fullest_card():
    known = Calibration(intra=1, inter=1, slowdown=0, ring=1)
    cluster = replace(SMALL, intra_bandwidth=1e18, inter_latency=0.0)
    for ranks, beside in ((8, 4), (16, 4), (2, 1), (6, 3)):
        place = Place(ranks, beside)
        call = estimate.Call("ep", "all_to_all", 1, 10**9, 0, "forward")
        leaving = 1e9 * (place.nodes - 1) / place.nodes
        found = timing.call_seconds(call, place, cluster, known)
        assert found == pytest.approx(leaving / cluster.inter_bandwidth)


def members(layout: Layout, kinds: list[str]) -> list[list[int]]:
    """The ranks of each group that spans these of a layout's sizes."""
    sizes = [getattr(layout, kind) for kind in layout.order]
    groups: dict[tuple, list[int]] = {}
    for rank in range(layout.gpus):
        left, place = rank, {}
        for kind, size in zip(layout.order, sizes):
            left, place[kind] = divmod(left, size)
        key = tuple(place[kind] for kind in layout.order if kind not in kinds)
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def test_a_group_is_within_a_node_if_each_group_of_its_kind_is():
    sizes = [s for s in itertools.product((1, 2, 3, 4, 6, 8), repeat=4) if math.prod(s) <= 96]
    for dp, tp, pp, cp in sizes:
        layout = Layout(dp=dp, tp=tp, pp=pp, cp=cp)
        for group, kinds in {"tp": ["tp"], "cp": ["cp"], "dp": ["cp", "dp"]}.items():
            spans = [{rank // 8 for rank in ranks} for ranks in members(layout, kinds)]
            alone = max(map(len, spans)) == 1
            assert (place_of(group, layout, 8).nodes == 1) == alone, (group, layout)


def test_experts_of_all_ranks_are_updated_once():
    model = replace(MODEL, experts=8, top_k=2)
    for zero in (0, 1, 3):
        one, eight = (
            estimate.step_time(model, Layout(dp=8, ep=ep, zero=zero), SEQ, SMALL).parts["optimizer"]
            for ep in (1, 8)
        )
        experts = estimate.memory(model, Layout(dp=8, ep=8), SEQ)["optimizer"]
        whole = estimate.memory(model, Layout(dp=8), SEQ)["optimizer"]
        wanted = 1.0 if zero else experts / whole
        assert eight / one == pytest.approx(wanted)


def test_plans_that_differ_are_described_in_other_words():
    model, hardware = replace(MODEL, experts=8, top_k=2), replace(SMALL, hbm_bytes=80 * 10**9)
    plans, _ = estimate.search(model, 8, 16, SEQ, hardware, keep=300)
    told = {estimate.described(plan.layout) for plan in plans}
    assert len(told) == len(plans) == 300
