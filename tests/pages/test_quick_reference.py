"""The quick reference says what the chapters say: their formulas, numbers, words and messages.

Nothing here is a second copy of the page: its tables are read, and each row is held against the
chapter's own function, its stored outputs, its text, or the source of the message.
"""

import ast
import functools
import itertools
import math
import random
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from torch.nn.functional import cross_entropy

import course_planner as estimate
from course_exercises.authoring import load_answer, load_code
from course_exercises.sources import chapters
from course_planner import Hardware, Layout, Model
from course_planner.figures import decision
from course_utils.launch import launch
from course_utils.lesson import models, schedules
from course_utils.trace import Call, kept_for_backward, ring_bytes
from tests.modules.test_plots import overlaps
from tests.support.reference_page import (
    PAGE,
    PLACE,
    chapter,
    formulas,
    plain,
    printed,
    prose,
    quotes,
    sections,
    table,
)

CHAPTERS = [f"{each.number:02d}" for each in chapters.chapters()]
NOTEBOOKS = [name for each in chapters.chapters() for name in each.notebooks]


# ---- formulas ------------------------------------------------------------------------------------

FORMULAS: dict[str, Callable] = {}


def row(*names: str) -> Callable:
    """Registers what the chapters say for rows of the formulas' tables: a function of the letters.

    It may set letters that the chapter fixes; the page's formula is computed with them afterwards.
    """

    def register(function: Callable) -> Callable:
        FORMULAS.update(dict.fromkeys(names, function))
        return function

    return register


class Letters(dict):
    """Values for the letters of the page, such that sizes divide by numbers of ranks."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        small = {x: draw.choice([2, 4, 8]) for x in "ndptkgv"}
        large = {x: 4096 * draw.randint(1, 50) for x in "PSTN"}
        sizes = {x: 16 * draw.randint(1, 9) for x in "WVCAIOhlUs"}
        times = {x: draw.uniform(1, 9) for x in "acrEx"}
        super().__init__(small | large | sizes | times)
        self |= {"b": 4, "L": 8 * draw.randint(1, 4), "H": draw.randint(1, 9), "m": 2 * self["p"]}
        self |= {
            "M": draw.uniform(5_000, 50_000),
            "speed": draw.uniform(1, 9),
            "D": draw.randint(1, 99),
        }

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


FUNCTIONS = {name: getattr(math, name) for name in ("ceil", "comb", "sqrt")}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("what", [cells[0] for cells in formulas()])
def test_a_formula_is_what_its_chapter_computes(what, seed):
    formula = next(plain(cells[1]) for cells in formulas() if cells[0] == what)
    letters = Letters(seed)
    expected = FORMULAS[what](letters)
    got = eval(formula, {**FUNCTIONS, **letters})
    assert got == pytest.approx(expected, rel=1e-6)


@functools.cache
def measured(number: int, name: str, ranks: int, *names: str) -> list:
    """What ranks return that run a function of a chapter, with other things of that chapter."""
    arguments = (load_code(number, other) for other in names)
    return launch(load_code(number, name), ranks, *arguments)


def ring(n: int, *calls: tuple[str, float]) -> int:
    """The bytes that `calls`, (name, bytes handed over), send from each of n ranks on a ring."""
    return ring_bytes(Call(op, size, 0, "", ranks=tuple(range(n))) for op, size in calls)


@row("all-reduce, on a ring")
def _(v):
    return ring(v.n, ("all_reduce", v.S))


@row("reduce-scatter, or all-gather of a result of S, on a ring")
def _(v):
    scattered, gathered = ring(v.n, ("reduce_scatter", v.S)), ring(v.n, ("all_gather", v.S // v.n))
    assert scattered == gathered
    return gathered


@row("all-reduce on a star: rank 0")
def _(v):
    v.n, v.S = 4, 4000
    return measured(3, "sum_through_rank_0", v.n)[0]


@row("hierarchical all-reduce, k machines of g ranks: inside")
def _(v):
    return ring(v.g, ("reduce_scatter", v.S), ("all_gather", v.S // v.g))


@row("the same, between machines")
def _(v):
    return ring(v.k, ("all_reduce", v.S // v.g))


@row("`nn.DataParallel`: parameters out, gradients back")
def _(v):
    v.P = count(load_code(2, "MnistNet")())
    traffic = load_code(2, "traffic_of_step")(v.n, batch=16)
    return traffic["replicate"] + traffic["replicate, gradients back"]


@row("DDP, handed over in a step")
def _(v):
    v.P = count(load_code(3, "MnistNet")())
    backward, _ = measured(3, "bytes_of_ddp", 2)[0]
    return backward


@row("gathers of a layer by ZeRO-3 in a stage under 1F1B, in number")
def _(v):
    layout = Layout(dp=2, pp=v.p, zero=3, micro_batches=v.m)
    calls = estimate.traffic(Model(3 * v.p, v.W, 1, 1), layout, v.s, stage=v.p // 2)
    gathers = [call.calls for call in calls if (call.group, call.op) == ("dp", "all_gather")]
    root = v.p // 2 == v.p - 1  # the last stage gathers its output layer too
    return (sum(gathers) - root) / 3


@row("ZeRO-1 and ZeRO-2, on a ring")
def _(v):
    return ring(v.n, ("reduce_scatter", v.P * v.b), ("all_gather", v.P * v.b // v.n))


@row("ZeRO-3, on a ring")
def _(v):
    gather = ("all_gather", v.P * v.b // v.n)
    return ring(v.n, gather, gather, ("reduce_scatter", v.P * v.b))


@row("a cut, h values a row: each direction")
def _(v):
    v.N, v.h = 64, 256
    there, back = measured(4, "sent_by", 2)
    assert there == back
    return there


@row("tensor parallel: a block, on a ring")
def _(v):
    v.b = 2
    _, seconds = load_code(6, "seconds_of_block")(v.t, v.W, v.T, inside=1)
    return seconds


def hybrid(v, dimension: str, layers: int) -> float:
    sizes = (v.d, v.p, v.t)
    return load_code(7, "bytes_of_step")(sizes, layers, v.W, v.T, v.P, number=v.b)[dimension]


@row("hybrid: tensor group")
def _(v):
    return hybrid(v, "tensor", v.L)


@row("hybrid: pipeline group, a stage in the middle")
def _(v):
    v.p = 4  # of two stages, none is in the middle
    return hybrid(v, "pipeline", v.L)


@row("hybrid: data group")
def _(v):
    return hybrid(v, "data", v.L)


@row("experts: a layer in a step, all n ranks together, k experts a token")
def _(v):
    v.n, v.k, v.W = 4, 2, load_code(11, "WIDTH")
    v.T = v.n * 24  # on each rank as many
    return sum(map(sum, launch(load_code(11, "tokens_sent"), v.n, 8)))


@row("model states with Adam: whole, in bytes")
def _(v):
    return load_answer("8.1")(v.P, v.n, 0)


@row("ZeRO-1, in bytes")
def _(v):
    return load_answer("8.1")(v.P, v.n, 1)


@row("ZeRO-2, in bytes")
def _(v):
    return load_answer("8.1")(v.P, v.n, 2)


@row("ZeRO-3, in bytes")
def _(v):
    return load_answer("8.1")(v.P, v.n, 3)


@row("FSDP, most parameters at once: blocks of U, the root unit of R")
def _(v):
    v.n, v.P = 4, load_code(8, "PARAMETERS")
    v.U = count(models.Block(load_code(8, "WIDTH"), 4))
    v.R = v.P - load_code(8, "LAYERS") * v.U
    _, of_layers = measured(8, "readings_of_wrappings", v.n)[0]["per block"]
    return max(parameters for _, parameters, _ in of_layers) / 4


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@row("parameters of a block")
def _(v):
    return count(models.Block(v.W, 4))


@row("parameters of a language model")
def _(v):
    with torch.device("meta"):
        return count(models.LanguageModel(v.V, v.W, 4, v.L, v.C))


@row("parameters of a block on t ranks")
def _(v):
    part_of = load_code(6, "part_of")
    named = models.Block(v.W, 2 * v.t).named_parameters()
    return sum(part_of(f"blocks.0.{name}", whole, 0, v.t).numel() for name, whole in named)


@row("parameters of E experts, their router and a shared expert")
def _(v):
    v.E = random.Random(v.S).randint(2, 9)
    return count(load_code(11, "MoE")(v.W, v.E, 2))


@row("places in the queue of an expert, factor f, k of E for a token")
def _(v):
    v.E, v.k, v.T = 7, random.Random(v.S).randint(1, 3), random.Random(v.S).randint(20, 60)
    v.f = 1.25
    return load_code(11, "fits")(torch.zeros(v.T, v.k, dtype=torch.int64), v.E, v.f).sum().item()


@row("activations of a block of the course, in bytes")
def _(v):
    def stored(layers):
        return load_code(4, "stage_bytes")(0, v.V, v.W, v.H, layers, v.T, 1)["activations"]

    return stored(4) - stored(2)  # stage 0 has half of the blocks


@row("activations of a block with dropout, 16 bits, in bytes")
def _(v):
    v.s = v.T  # one sample
    return load_code(1, "transformer")(v.P, 1, v.W, v.H, v.s, 1, 8, 80, 300).sample_bytes


@row("the same on t ranks, scores computed again, sequence shared out")
def _(v):
    v.W = v.t * v.W
    model, layout = Model(1, v.W, 1, 1), Layout(tp=v.t, recompute="selective")
    return load_answer("12.1")(model, layout, v.T, 0)["activations"]


@row("activations kept of a block that is recomputed, in bytes")
def _(v):
    recompute = load_code(8, "recompute")
    v.T = v.s  # one sequence

    def kept_by(layers):
        model = recompute(models.LanguageModel(v.V, v.W, 1, layers, v.T))
        with kept_for_backward(model) as kept:
            model(torch.zeros(1, v.T, dtype=torch.int64))
        return kept.bytes

    return (kept_by(4) - kept_by(2)) / 2


@row("micro-batches in flight, GPipe")
def _(v):
    peaks = schedules.simulate(schedules.gpipe(v.p, v.m)).peak_in_flight
    assert len(set(peaks)) == 1
    return peaks[0]


@row("micro-batches in flight on rank r, 1F1B")
def _(v):
    v.r, v.m = random.Random(v.S).randrange(v.p), random.Random(v.S).randint(1, 2 * v.p)
    return schedules.simulate(schedules.one_forward_one_backward(v.p, v.m)).peak_in_flight[v.r]


@row("first GPU of `nn.DataParallel`, in bytes")
def _(v):
    first, _ = load_code(2, "memory_model")(v.n, v.N, v.P, v.I, v.A, v.O)
    return sum(first.values())


def of_context(v, function: str, way: str):
    """What ranks of chapter 10 count of one of its ways, with its own sizes in the letters."""
    v.n, v.S, v.T, v.H = (load_code(10, name) for name in ("n", "S", "tokens", "heads"))
    ways = {way: load_code(10, way)}
    return launch(load_code(10, function), v.n, ways)[0][way]


@row("ring attention, S of keys on a rank: forward")
def _(v):
    return of_context(v, "bytes_and_scores", "ring_forward")[0]


@row("ring attention: backward")
def _(v):
    return of_context(v, "equality_and_bytes", "ring")[1]


@row("attention by heads (Ulysses): each direction")
def _(v):
    there, _ = of_context(v, "bytes_and_scores", "by_heads")
    assert there == of_context(v, "equality_and_bytes", "by_heads")[1]
    return there


@row("largest scores of attention in a ring, in bytes")
def _(v):
    _, largest = of_context(v, "bytes_and_scores", "ring")
    v.N, v.s = 1, v.T  # one sequence
    return largest


@row("idle share of a cut model, one batch")
def _(v):
    return schedules.simulate(schedules.gpipe(v.p, 1)).idle_share


@row("bubble of a pipeline, of the ideal time")
def _(v):
    return schedules.simulate(schedules.one_forward_one_backward(v.p, v.m)).bubble


@row("the same, of the total time")
def _(v):
    return load_answer("5.1")(v.p, v.m)


@row("interleaved, of the ideal time")
def _(v):
    return schedules.simulate(schedules.interleaved(v.p, v.m, v.v)).bubble


def idle_under(v, schedule: Callable, place=schedules.looped) -> float:
    v.tF = v.tB = v.tW = 1
    result = schedules.simulate(schedule(v.p, v.m), forward=1, backward=2, weight=1, place=place)
    return result.step - result.work


@row("ZB-H1, idle time of a step")
def _(v):
    return idle_under(v, schedules.zb_h1)


@row("ZB-H2, idle time of a step")
def _(v):
    return idle_under(v, schedules.zb_h2)


@row("DualPipe-V, idle time of a step, tF = tB >= tW")
def _(v):
    return idle_under(v, schedules.dualpipe_v, schedules.v_shaped)


@row("passes through half a stage in flight, ZB-V")
def _(v):
    plan = schedules.zb_v(v.p, v.m)
    return max(schedules.simulate(plan, place=schedules.v_shaped).peak_in_flight)


@row("m batches forward through stages")
def _(v):
    v.times = [random.Random(v.S + i).randint(1, 9) for i in range(v.p)]
    return load_code(4, "stream")(v.times, v.m)[-1][-1][1]


@row("one all-reduce on a ring, start-up a in each step")
def _(v):
    return 2 * (v.n - 1) * v.a + ring(v.n, ("all_reduce", v.S)) / v.speed


@row("one all-gather on a ring, start-up a in each round")
def _(v):
    links = {"intra_bandwidth": v.speed * 1e9, "inter_bandwidth": v.speed * 1e9}
    v.speed, v.a = v.speed * 1e9, v.a * 1e-6
    hardware = Hardware(1e12, 10**9, 1e12, v.n, intra_latency=v.a, inter_latency=0.0, **links)
    call = estimate.Call("tp", "all_gather", 1, v.S, 0, "step")
    return load_answer("12.3")([], [call], Layout(tp=v.n), 0.0, hardware)


@row("exposed of k buckets, each r, backward takes E")
def _(v):
    return load_code(3, "schedule")(v.k, v.E, v.r)[-1][1] - v.E


@row("operations of a training step")
def _(v):
    v.T = v.s * 3
    return 140e12 * load_code(1, "transformer")(v.P, 1, v.W, 1, v.s, 3, 8, 80, 300).compute_seconds


@row("the same of one token, with attention")
def _(v):
    model = Model(v.L, v.W, 1, 4096)
    v.P = estimate.parameters(model)
    return estimate.flops(model, v.s, 1)


@row("operations of a block, forward")
def _(v):
    v.s = v.T  # one sequence
    seconds, _ = load_code(6, "seconds_of_block")(v.t, v.W, v.T, flops=1)
    return seconds * v.t / 3  # the chapter's are of forward and backward, on one of t ranks


@row("rank at the place i, j, k of a grid d x p x t")
def _(v):
    v.i, v.j, v.k = v.d - 1, v.p // 2, v.t - 1
    groups = load_answer("7.1")({"data": v.d, "pipeline": v.p, "tensor": v.t})
    return groups["tensor"][v.i * v.p + v.j][v.k]


@row("ways to cut l stations into p stages")
def _(v):
    v.l, v.p = 8, v.p // 2 + 1
    stages = load_code(4, "stage_work")
    places = itertools.product(range(v.l + 1), repeat=v.p - 1)
    works = (tuple(stages([1] * v.l, cuts)) for cuts in places if list(cuts) == sorted(cuts))
    return len({work for work in works if min(work) > 0})


@row("loss of a batch, from chunks of (rows, mean loss)")
def _(v):
    torch.manual_seed(v.S)
    v.N = 13
    outputs, labels = torch.randn(v.N, 5), torch.randint(5, (v.N,))
    parts = zip(outputs.split(4), labels.split(4))
    v.chunks = [(len(mine), cross_entropy(out, mine).item()) for out, mine in parts]
    return cross_entropy(outputs, labels).item()


@row("steps done twice: death after D, saved every k")
def _(v):
    saved = max(step for step in range(v.D + 1) if step % v.k == 0)
    return v.D - saved


@row("mean time between failures of a job")
def _(v):
    v.nodes, v.node_mtbf = v.n, v.M * v.n
    steps, share = load_answer("9.4")(v.nodes, v.node_mtbf / 3600, v.c, v.r, 1.0)
    return (steps / 2 + v.r) / (share - v.c / steps)  # the only M that gives this share


@row("share lost: saving takes c, recovery r, every x")
def _(v):
    v.x, share = load_answer("9.4")(1, v.M / 3600, v.c, v.r, 1.0)
    return share


@row("best interval between checkpoints")
def _(v):
    steps, _ = load_answer("9.4")(1, v.M / 3600, v.c, v.r, 1e-3)
    return steps * 1e-3


def test_every_formula_is_a_row_of_its_own():
    names = [cells[0] for cells in formulas()]
    assert len(names) == len(set(names))
    assert set(names) == set(FORMULAS)


# ---- places, numbers, links ----------------------------------------------------------------------


@pytest.mark.parametrize("place", sorted(set(PLACE.findall(prose(PAGE)))), ids=" ".join)
def test_a_place_exists(place):
    number, section, title = place
    headings = sections(number)[section]
    assert any(title in heading for heading in headings), headings


def test_every_formula_has_a_place_and_a_source():
    for what, _, where, source in formulas():
        assert PLACE.fullmatch(where), what
        assert source, what


def test_the_numbers_of_the_decision_guide_are_those_of_the_chapters():
    seen = 0
    for *_, numbers, where in table("what", "a rank holds, of the model states"):
        linked = re.findall(r"\((\d\d)\w+?(_further)?\.ipynb\)", where)
        names = [number + further.replace("_", " ") for number, further in linked]
        known = [prose(chapter(name)) + printed(name) for name in names]
        if where.startswith("[00]"):
            known.append(printed("08"))  # the ledger of one process is measured there
        for number in re.findall(r"\d+\.\d+|\d{1,3}(?:,\d{3})+|\d{2,}", numbers):
            seen += 1
            stands = re.compile(rf"(?<![\d.,]){re.escape(number)}0*(?![\d])")
            plain_text = "\n".join(known).replace("_", ",")
            assert stands.search(plain_text), (number, where)
    assert seen > 10


def test_links_lead_to_chapters():
    files = set(re.findall(r"\]\(([\w./]+\.ipynb)\)", prose(PAGE)))
    assert files <= {f"{name}.ipynb" for name in NOTEBOOKS}
    assert files >= {f"{chapter(number).stem}.ipynb" for number in CHAPTERS}


def test_the_picture_asks_about_chapters_that_exist_and_is_readable():
    figure = decision.decision_guide()
    words = " ".join(text.get_text() for text in figure.axes[0].texts)
    chapters = re.findall(r"chapter (\d+)", words)
    assert chapters == ["3", "8", "6", "5", "10", "11", "7", "9"]
    assert not list(overlaps(figure))
    plt.close(figure)


# ---- glossary ------------------------------------------------------------------------------------

# Bold, and no words to look up: the factory's own words, labels of a list, a stress on a word.
NOT_WORDS = {
    "00": {"shift+enter"},
    "02": {"floors", "sum"},
    "04": {"idle", "meta", "profile"},
    "07": {"data", "pipeline", "tensor", "part"},
    "08": {
        *("parameters", "gradients", "views", "layer", "meta"),
        *("stages 1 and 2", "stage 3", "the mesh", "gathers overlap with computing"),
        "the model is built on the meta device",
    },
    "09": {
        *("foreman", "register", "safe", "with nccl"),
        "model, optimizer, scheduler, position in the data, random numbers",
        *("the order of samples", "the gradient", "random numbers", "the learning rate"),
        *("somebody has to start agents", "the endpoint"),
    },
    "11": {"specialists", "dispatcher", "not an expert", "the host waits"},
    "12": {"judge"},
}


def bold(notebook: str) -> set[str]:
    """What stands in bold in a notebook, as the glossary writes it."""
    found = re.findall(r"\*\*(.+?)\*\*", prose(source(notebook)), re.DOTALL)
    return {word(text) for text in found}


def source(notebook: str) -> Path:
    return chapters.ROOT / "solutions" / f"{notebook}.py"


def word(text: str) -> str:
    """A word as it is compared: one spelling, no final mark."""
    return " ".join(text.split()).rstrip(".:").lower().replace("normalization", "normalisation")


GLOSSARY = {cells[0]: cells[1:] for cells in table("word", "meaning", "chapter")}


@pytest.mark.parametrize("term", GLOSSARY)
def test_a_word_stands_in_bold_in_its_chapter(term):
    meaning, where = GLOSSARY[term]
    notebook = re.match(r"\[\d\d\]\((\w+)\.ipynb\)", where)[1]
    assert word(term) in bold(notebook)
    assert 10 < len(meaning) < 130 and not meaning.endswith("."), meaning


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_every_bold_word_of_a_chapter_is_in_the_glossary(notebook):
    known = {word(term) for term in GLOSSARY}
    known |= {term + end for term in known for end in ("s", "es")} | NOT_WORDS.get(
        notebook[:2], set()
    )
    found = re.findall(r"\*\*(.+?)\*\*", prose(source(notebook)), re.DOTALL)
    labels = re.compile(r"[\d`].*|predict|sources|checkpoints|(?s:.*[.:])", re.IGNORECASE)
    missing = {word(text) for text in found if not labels.fullmatch(text)} - known
    assert not missing, f"explain in solutions/quick_reference.py, or add to NOT_WORDS: {missing}"


def test_the_glossary_is_in_order_and_has_no_word_twice():
    names = [cells[0] for cells in table("word", "meaning", "chapter")]
    assert names == sorted(set(names), key=str.lower)


# ---- messages ------------------------------------------------------------------------------------


@functools.cache
def spoken() -> str:
    """All texts in the source of the package, each on a line, with ? for what is filled in."""
    lines = []
    for path in sorted(chapters.ROOT.glob("course_*/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                lines.append(" ".join(node.value.split()))
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "?" for v in node.values]
                lines.append(" ".join("".join(map(str, parts)).split()))
    return "\n".join(lines)


LAUNCH = list(table("it says", "what happened"))
CHECK = list(table("it says", "what it means"))
TORCH = list(table("it says", "why, in this course"))


@pytest.mark.parametrize("cells", LAUNCH + CHECK, ids=lambda cells: cells[0])
def test_the_package_says_so(cells):
    said = quotes(cells[0])
    assert said
    for words in said:
        assert words in spoken(), words


@pytest.mark.parametrize("cells", [c for c in LAUNCH + TORCH if c[-1]], ids=lambda cells: cells[0])
def test_the_chapter_shows_it(cells):
    for number, _, _ in PLACE.findall(cells[-1]):
        text = printed(number) + chapter(number).read_text(encoding="utf-8")
        assert any(words in text for words in quotes(cells[0])), number
