import itertools

import matplotlib
import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

matplotlib.use("Agg")
from course_planner.figures import plans
from course_utils import plots
from course_utils.lesson import schedules
from course_utils.plots import collectives
from course_utils.trace import Call, Record, Span


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def overlaps(figure):
    """Pairs of visible texts that cover each other, and texts that leave the figure."""
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    beyond = set()  # matplotlib keeps ticks outside the axes' limits, and does not draw them
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        low, high = sorted(axis.get_view_interval())
        beyond |= {
            tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high
        }
    texts = [t for t in figure.findobj(matplotlib.text.Text) if t.get_visible() and t.get_text()]
    texts = [text for text in texts if text not in beyond]
    boxes = [(t.get_text(), t.get_window_extent(renderer).shrunk(0.96, 0.9)) for t in texts]
    for (one, a), (two, b) in itertools.combinations(boxes, 2):
        if a.overlaps(b) and a.width * b.width > 0:
            yield one, two
    for text, box in boxes:
        if box.x0 < -1 or box.x1 > figure.bbox.width + 1:
            yield text, "the figure's edge"


def step(rank):
    """Forward, backward with an all_reduce beside it, update: the lane of one rank."""
    spans = [
        Span("forward", "compute", 0.0, 0.010 + 0.001 * rank),
        Span("backward", "compute", 0.010 + 0.001 * rank, 0.030),
        Span("all_reduce", "communication", 0.015 + 0.002 * rank, 0.034, True, 0),
        Span("wait", "waiting", 0.030, 0.034),
        Span("update", "compute", 0.034, 0.036),
    ]
    return Record(rank, spans, [Call("all_reduce", 4, 1, "float32", True, (0, 1))])


def bars(ax, color):
    return [p for p in ax.patches if p.get_facecolor()[:3] == to_rgb(color)]


def test_a_timeline_shows_every_span_at_its_time():
    figure = plots.timeline([step(0), step(1)], "One step")
    (ax,) = figure.axes
    assert ax.get_title(loc="left") == "One step"
    assert ax.get_xlabel() == "time (ms)"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1"]
    forward = bars(ax, plots.COLORS["forward"])
    assert [(p.get_x(), p.get_width()) for p in forward] == [(0, 10), (0, 11)]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["forward", "backward", "update", "communication", "waiting"]
    assert not list(overlaps(figure))


def test_background_communication_has_its_own_lane():
    (ax,) = plots.timeline([step(0), step(1)]).axes
    for backward, side in zip(
        bars(ax, plots.COLORS["backward"]), bars(ax, plots.COLORS["communication"])
    ):
        assert backward.get_y() + backward.get_height() < side.get_y()
    # until rank 1 has come, rank 0's all_reduce waits
    assert [p.get_x() for p in bars(ax, plots.COLORS["communication"])] == [17, 17]


def test_timelines_share_a_scale_and_can_be_in_a_models_unit():
    model = [Record(0, [Span("forward", "compute", 0, 6)])]
    figure = plots.timelines({"a": model, "b": model}, unit="hours")
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim() == (0, 6)
    assert below.get_xlabel() == "time (hours)"
    assert not list(overlaps(figure))


@pytest.mark.parametrize("count", [1, 4, 7])
def test_a_legend_has_as_many_columns_as_fit(count):
    figure, _ = plt.subplots()
    names = [
        "forward",
        "communication",
        "waiting",
        "parameters",
        "gradients",
        "activations",
        "load",
    ]
    plots.legend(figure, {name: Rectangle((0, 0), 1, 1) for name in names[:count]})
    assert not list(overlaps(figure))


def test_a_legend_has_kinds_in_one_order_and_other_names_where_they_were():
    figure, _ = plt.subplots()
    names = ["waiting", "a name", "backward", "parameters", "forward"]
    plots.legend(figure, {name: Rectangle((0, 0), 1, 1) for name in names})
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["forward", "a name", "backward", "parameters", "waiting"]
    figure, _ = plt.subplots()
    plots.legend(figure, {f"one of nine {n}": Rectangle((0, 0), 1, 1) for n in range(9)})
    assert figure.legends[0]._ncols == 5, "nine in rows of at most five: five and four"


def boxes(ax, color):
    """The boxes of a Gantt chart that have this colour: (rank, start, end), from left to right."""
    collections = [c for c in ax.collections if to_rgb(c.get_facecolor()[0][:3]) == color]
    corners = [path.vertices for c in collections for path in c.get_paths()]
    return sorted(
        (round(v[:, 1].mean()), v[:, 0].min(), v[:, 0].max()) for v in (c[:4] for c in corners)
    )


def recorded(simulation, start, second):
    """Records of a run that went exactly as simulated, one forward pass taking `second`."""
    ranks = {}
    for s in simulation.spans:
        span = Span(str(s.op), "compute", start + second * s.start, start + second * s.end)
        ranks.setdefault(s.rank, []).append(span)
    other = Span("update", "compute", start + 90 * second, start + 91 * second)
    return [Record(rank, [*spans, other]) for rank, spans in ranks.items()]


def test_gantt_draws_every_op_at_its_time():
    figure = plots.gantt(schedules.simulate(schedules.zb_h1(2, 2)))
    (ax,) = figure.axes
    forward, backward, weights = (
        boxes(ax, to_rgb(plots.COLORS[kind])) for kind in ("forward", "backward", "parameters")
    )
    assert forward == [(0, 0, 1), (0, 1, 2), (1, 1, 2), (1, 3, 4)]
    assert backward == [(0, 3, 4), (0, 5, 6), (1, 2, 3), (1, 4, 5)]
    assert weights == [(0, 4, 5), (0, 6, 7), (1, 5, 6), (1, 6, 7)]
    assert [t.get_text() for t in ax.texts] == list("010101010101")
    assert ax.get_xlim() == (0, 7)
    legend = [t.get_text() for t in figure.legends[0].get_texts()]
    assert legend == ["F: forward", "B: backward", "W: weights' part", "idle"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1"]


def test_the_legend_of_several_gantt_charts_ends_with_idle():
    plans = {"one": schedules.gpipe(2, 2), "two": schedules.zb_h1(2, 2)}
    figure = plots.gantt({title: schedules.simulate(plan) for title, plan in plans.items()})
    legend = [t.get_text() for t in figure.legends[0].get_texts()]
    assert legend == ["F: forward", "B: backward", "W: weights' part", "idle"]


def test_gantt_tells_chunks_apart():
    figure = plots.gantt(schedules.simulate(schedules.interleaved(2, 2, 2)))
    (ax,) = figure.axes
    assert boxes(ax, to_rgb(plots.COLORS["forward"]))[:2] == [(0, 0, 0.5), (0, 0.5, 1)]
    colors = {tuple(c.get_facecolor()[0]) for c in ax.collections}
    assert len(colors) == 4
    legend = [t.get_text() for t in figure.legends[0].get_texts()]
    assert legend == ["F: forward", "F, chunk > 0", "B: backward", "B, chunk > 0", "idle"]


def test_gantt_draws_records_as_it_draws_their_simulation():
    simulation = schedules.simulate(schedules.interleaved(2, 4, 2))
    records = recorded(simulation, start=0.7, second=0.003)
    figure = plots.gantt({"simulated": simulation, "measured": records})
    above, below = figure.axes
    for color in (plots.COLORS["forward"], plots.COLORS["backward"]):
        for a, b in zip(boxes(above, to_rgb(color)), boxes(below, to_rgb(color)), strict=True):
            assert a == pytest.approx(b)
    assert [t.get_text() for t in above.texts] == [t.get_text() for t in below.texts]
    assert not list(overlaps(figure))


def test_the_unit_of_a_gantt_chart_is_a_forward_pass():
    plan = schedules.gpipe(2, 2)
    usual, slow = schedules.simulate(plan), schedules.simulate(plan, forward=3, backward=6)
    uneven = schedules.simulate(plan, forward=[1, 3], backward=[2, 6])  # a mean of 2
    above, middle, below = plots.gantt({"usual": usual, "slow": slow, "uneven": uneven}).axes
    assert [path.vertices.tolist() for c in above.collections for path in c.get_paths()] == [
        path.vertices.tolist() for c in middle.collections for path in c.get_paths()
    ]
    assert boxes(below, to_rgb(plots.COLORS["forward"]))[:2] == [(0, 0, 0.5), (0, 0.5, 1)]
    assert above.get_xlabel() == "" and below.get_xlabel().startswith("time (forward passes")


@pytest.mark.parametrize(
    "stages, micro_batches, chunks",
    [(1, 1, 1), (2, 2, 4), (4, 8, 1), (4, 8, 2), (8, 8, 1), (8, 16, 3), (2, 12, 1), (2, 99, 1)],
)
def test_numbers_of_a_gantt_chart_stay_in_their_boxes(stages, micro_batches, chunks):
    simulation = schedules.simulate(
        schedules.interleaved(stages, micro_batches, chunks), latency=0.1
    )
    figure = plots.gantt(simulation)
    assert not list(overlaps(figure))
    (ax,) = figure.axes
    box = {
        (rank, round((start + end) / 2, 6)): end - start
        for color in {tuple(c.get_facecolor()[0][:3]) for c in ax.collections}
        for rank, start, end in boxes(ax, color)
    }
    inverse = ax.transData.inverted()
    for text in ax.texts:
        x, rank = text.get_position()
        extent = text.get_window_extent()
        width = inverse.transform((extent.x1, 0))[0] - inverse.transform((extent.x0, 0))[0]
        assert width < box[rank, round(x, 6)]
    if chunks == 1:  # all of them where there is room, and none where there is not
        numbered = len(list(simulation.spans)) if micro_batches < 99 else 0
        assert len(ax.texts) == numbered


def test_a_gantt_chart_of_nothing_says_what_is_missing():
    with pytest.raises(ValueError, match='spans with names like "F3" and "B3"'):
        plots.gantt([step(0)])


def test_memory_in_human_units():
    assert [plots.human_bytes(n) for n in (0, 1023, 1024, 159_040, 3 << 30, 5 << 40)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "155.3 KiB",
        "3.0 GiB",
        "5.0 TiB",
    ]
    ledger = {"parameters": 159_040, "gradients": 159_040, "optimizer": 318_080, "buffers": 0}
    half = {kind: count // 2 for kind, count in ledger.items()}
    figure = plots.memory([ledger, half], ["one rank", "two ranks, half the layers each"])
    (ax,) = figure.axes
    assert [p.get_width() for p in bars(ax, plots.COLORS["optimizer"])] == [318_080, 159_040]
    assert {"621.2 KiB", "310.6 KiB"} <= {text.get_text() for text in ax.texts}
    assert not list(overlaps(figure))


def test_the_numbers_of_a_memory_figure_are_in_one_unit_and_stay_in_their_bars():
    ledger = {"parameters": 3 << 30, "gradients": 700 << 20, "optimizer": 10 << 20}
    figure = plots.memory([ledger, {"parameters": 512 << 20}], ["a", "b"])
    (ax,) = figure.axes
    numbers = [text.get_text() for text in ax.texts]
    assert numbers == ["3.00 GiB", "0.68 GiB", "3.69 GiB", "0.50 GiB", "0.50 GiB"]
    assert not list(overlaps(figure))


def test_loss_curves_leave_equal_curves_visible():
    figure = plots.loss_curves({"one": [3, 2, 1], "two": [3, 2, 1], "three": [3, 2, 1]})
    first, second, third = figure.axes[0].lines
    assert first.get_linewidth() > second.get_linewidth() > third.get_linewidth()
    assert list(first.get_xdata()) == [1, 2, 3]
    assert len({line.get_linestyle() for line in (first, second, third)}) == 3
    assert len({line.get_color() for line in (first, second, third)}) == 3
    assert not list(overlaps(figure))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_collectives_fit(ranks):
    figure = plots.before_and_after(list(collectives._BLOCKS), ranks)
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        *("broadcast", "reduce", "scatter", "all_reduce"),
        *("gather", "reduce_scatter", "all_gather", "all_to_all"),
    ]
    assert not list(overlaps(figure))
    for patch in (patch for ax in figure.axes for patch in ax.patches):
        box = patch.get_window_extent()
        assert box.x1 <= figure.bbox.x1 and box.y0 >= figure.bbox.y0 and box.y1 <= figure.bbox.y1


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_ring_ends_with_every_sum_on_every_rank(ranks):
    stripes, sums = [], []
    for step in range(1, 2 * ranks):
        figure = plots.ring_step(step, ranks)
        assert not list(overlaps(figure))
        (ax,) = figure.axes
        boxes = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
        stripes.append(sum(box.get_fill() for box in boxes))
        sums.append(sum(box.get_linewidth() > 1 for box in boxes))
        sent = len(ax.patches) - len(boxes)  # the last rank's arrow is in two parts
        assert sent == (ranks + 1 if step < 2 * ranks - 1 else 0)
    assert stripes[0] == ranks**2 and stripes[-1] == ranks**3  # each block of all ranks' colours
    assert sums == [0] * (ranks - 1) + [ranks * (i + 1) for i in range(ranks)]


def test_what_collectives_do():
    """The pictures against the definition: who holds which piece of whom, written out for two."""
    assert {name: blocks(2) for name, blocks in collectives._BLOCKS.items()} == {
        "broadcast": ([["A"], [""]], [["A"], ["A"]]),
        "scatter": ([["A0", "A1"], ["", ""]], [["A0"], ["A1"]]),
        "gather": ([["A"], ["B"]], [["A", "B"], ["", ""]]),
        "all_gather": ([["A"], ["B"]], [["A", "B"], ["A", "B"]]),
        "reduce": ([["A"], ["B"]], [["A+B"], ["?"]]),
        "all_reduce": ([["A"], ["B"]], [["A+B"], ["A+B"]]),
        "reduce_scatter": ([["A0", "A1"], ["B0", "B1"]], [["A0+B0"], ["A1+B1"]]),
        "all_to_all": ([["A0", "A1"], ["B0", "B1"]], [["A0", "B0"], ["A1", "B1"]]),
    }


def test_the_drawing_kit_stays_on_its_canvas():
    figure, ax = plots.canvas(8, 3)
    assert ax.get_xlim() == (0, 10) and ax.get_ylim() == (0, 3.75)
    plots.building(ax, 0.2, 0.2, label="rank 0")
    plots.truck(ax, 2.2, 0.2, label="grad")
    plots.pile(ax, 3.5, 0.2, [plots.RANK_COLORS[0]] * 7, label="batch")
    plots.blueprint(ax, 5.0, 0.6, label="half", part=(0.5, 1))
    plots.arrow(ax, (8.3, 1.0), (9.8, 1.0), label="loss")
    assert not list(overlaps(figure))
    limits = ax.get_window_extent()
    for patch in ax.patches:
        box = patch.get_window_extent()
        assert limits.x0 <= box.x0 and box.x1 <= limits.x1 + 1 and limits.y0 <= box.y0


@pytest.mark.parametrize("held", [30, 66, 78.8, 120])
@pytest.mark.parametrize(("unit", "name"), [(1e9, "GB"), (2**30, "GiB")])
def test_sums_of_a_plan_stand_clear_of_bars_and_of_the_limit(held, unit, name):
    half = held * unit / 2
    ledgers = {f"stage {n}": {"parameters": half, "activations": half} for n in range(3)}
    seconds = {name: {"matrices": 3.0, "messages": 1.0} for name in ledgers}
    if name == "GB":
        figure = plans.fit(ledgers, 80 * unit, "a plan")
    else:
        figure = plans.fit_and_time(ledgers, seconds, 80 * unit, "seconds", "a layout")
    assert not list(overlaps(figure))
    ax = figure.axes[0]
    (line,) = ax.lines
    assert line.get_xdata()[0] == 80 < ax.get_xlim()[1]
    bar, limit = (ax.transData.transform((end, 0))[0] for end in (held, 80))
    assert [text.get_text() for text in ax.texts] == [f"{held:.1f} {name}"] * 3
    for box in (text.get_window_extent() for text in ax.texts):
        assert bar < box.x0 and not box.x0 <= limit <= box.x1


def test_a_kind_too_small_to_be_seen_has_no_edge_over_it_and_no_place_in_the_legend():
    ledger = {"parameters": 0.1e9, "gradients": 2e9, "activations": 60e9}
    figure = plans.fit({"a rank": ledger}, 80e9, "a plan")
    edges = [bar.get_edgecolor()[3] for bar in figure.axes[0].patches]
    assert edges == [0, 1, 1]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["gradients", "activations"]


def test_seconds_of_a_plan_have_the_colours_of_what_they_are():
    communication = {"tensor", "context", "experts", "data", "messages", "other groups"}
    looks = plans.SECONDS
    of = {kind for kind, (color, _) in looks.items() if color == plots.COLORS["communication"]}
    assert of == communication
    assert not {plots.COLORS["wrong"], plots.COLORS["load"]} & {
        color for color, _ in looks.values()
    }
    assert len(set(looks.values())) == len(looks), "each colour with another hatch"
    figure = plans.where_time_goes({"a step": {"tensor": 8.0, "messages": 1.0}}, "a plan")
    tensor, messages = (bar.get_facecolor() for bar in figure.axes[0].patches)
    assert tensor != messages, "a hatch is not seen on a small piece"


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_star_and_ring(ranks):
    figure, (left, right) = plt.subplots(1, 2)
    plots.star(left, ranks)
    plots.ring(right, ranks)
    arrows = [
        sum(isinstance(p, matplotlib.patches.FancyArrowPatch) for p in ax.patches)
        for ax in (left, right)
    ]
    assert arrows == [2 * (ranks - 1), ranks]
    assert not list(overlaps(figure))


def test_colours_differ_for_eyes_that_see_no_red_or_no_green():
    """Kinds that stand side by side in one figure, as people with dichromacy see them.

    Simulation: Vienot, Brettel, Mollon 1999 (protanopia, deuteranopia), on linear RGB.
    """
    import numpy as np

    protan = np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]])
    deutan = np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]])
    time_kinds = ["forward", "backward", "update", "communication", "waiting", "load"]
    memory_kinds = ["parameters", "gradients", "optimizer", "activations", "buffers", "temporary"]
    for kinds in (time_kinds, memory_kinds):
        for matrix in (np.eye(3), protan, deutan):
            seen = [matrix @ (np.array(to_rgb(plots.COLORS[kind])) ** 2.2) for kind in kinds]
            seen = [np.clip(color, 0, 1) ** (1 / 2.2) for color in seen]
            for (one, a), (two, b) in itertools.combinations(zip(kinds, seen), 2):
                assert np.linalg.norm(a - b) > 0.1, (one, two)


def test_a_line_that_is_no_kind_of_thing_has_no_kinds_colour():
    kinds = {to_rgb(color) for name, color in plots.COLORS.items() if name != "ink"}
    cycle = [to_rgb(look["color"]) for look in plt.rcParams["axes.prop_cycle"]]
    lines = [to_rgb(look["color"]) for look in plots.LINES]
    assert not kinds & {*cycle, *lines}
    looks = {(look["color"], str(look["linestyle"])) for look in plots.LINES}
    assert len(looks) == len(plots.LINES)
