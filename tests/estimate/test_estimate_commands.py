"""python -m course_utils trace and plan: what they print, write and draw, and what they refuse."""

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import course_planner as estimate
from course_planner import (
    Calibration,
    Hardware,
    Layout,
    Trace,
    catalogue,
    example,
    options,
    published,
    searching,
)
from course_planner.memory import AVOIDED, fullest, tensors
from course_utils.__main__ import main
from course_utils.trace import Call, Record

EXAMPLE = Path(example.__file__)
PNG = b"\x89PNG"
SMALL = Hardware(100e12, 16 * 10**9, 1e12, 4, 100e9, 5e-6, 10e9, 1e-5)


def left(capsys, *arguments) -> str:
    """What the command says as it leaves with an error."""
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    assert "Traceback" not in capsys.readouterr().err
    assert isinstance(ended.value.code, str)  # printed, and the exit status is 1
    return ended.value.code


def test_a_program_is_traced_printed_written_and_drawn(tmp_path, capsys):
    data, picture = tmp_path / "trace.json", tmp_path / "trace.png"
    arguments = ["--ranks", "64", "--layout", "tp=8,micro_batch=16", "--rank", "0", "9"]
    main(["trace", str(EXAMPLE), *arguments, "--json", str(data), "--picture", str(picture)])
    shown, written = capsys.readouterr().out, json.loads(data.read_text())
    assert "example.py on 64 ranks: dp 8 x cp 1 x pp 1 x tp 8" in shown
    assert [row["rank"] for row in written["ranks"]] == [0, 9]
    layout = Layout(dp=8, tp=8, micro_batch=16)
    assert Layout(**written["layout"] | {"order": tuple(written["layout"]["order"])}) == layout
    trace = estimate.trace(example.program, layout, rank=9)
    row = written["ranks"][1]
    assert (row["flops"], row["peak"], row["held"]) == (trace.flops, trace.peak, trace.held)
    assert row["calls"] == [asdict(call) for call in trace.calls]
    assert row["seconds"] == estimate.traced_seconds(trace, layout, published.H100)
    # forward, and backward for the weights and the inputs, but for those of the first matrix
    assert row["flops"] == (3 * 32 - 1) * 2 * 16 * 4 * 8192**2 // 8
    assert f"most of it: {row['limit']}" in shown and row["limit"] == "data"
    assert f"holds at most {row['peak'] / 2**30:.3g} GiB" in shown
    assert "which fits in the 79.1 GiB of H100" in shown
    assert picture.read_bytes().startswith(PNG)


def test_a_trace_that_does_not_fit_says_so(tmp_path, capsys):
    main(
        ["trace", str(EXAMPLE), "--ranks", "1", "--layout", "", "--hardware", "H100,hbm_bytes=1e9"]
    )
    shown = capsys.readouterr().out
    assert "GiB more than the 0.931 GiB of H100,hbm_bytes=1e9" in shown


def test_help_shows_what_a_program_must_define(capsys):
    with pytest.raises(SystemExit):
        main(["trace", "--help"])
    shown = capsys.readouterr().out
    for line in EXAMPLE.read_text().splitlines():
        assert line in shown


def test_tracing_tells_how_far_it_is():
    heard = []
    estimate.trace(example.program, Layout(dp=4), 0, heard.append)
    assert list(dict.fromkeys(heard)) == ["building", "first step", "second step"]
    assert heard == sorted(heard, key=["building", "first step", "second step"].index)


PROGRAMS = {
    "other = 1": "has no function program(mesh, layout)",
    "program = 1": "has no function program(mesh, layout)",
    "def program(": "The program cannot be read.",
    "import no_such_module": "line 1: import no_such_module\nModuleNotFoundError: No module named",
    "def program(mesh, layout):\n    return 1 / 0": "line 2: return 1 / 0\nZeroDivisionError",
    "def program(mesh, layout):\n    return lambda: [][layout.tp]": "IndexError: list index",
    "def program(mesh, layout):\n    pass": "returns a step, a function without arguments",
    "import torch\ndef program(mesh, layout):\n    return lambda: torch.ones(2).sum().item()": (
        "needs the value of a tensor"
    ),
    "import torch\ndef program(mesh, layout):\n    return lambda: torch.ones(2, 3) @ torch.ones(2)": (
        "line 3: return lambda: torch.ones(2, 3) @ torch.ones(2)\nRuntimeError"
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", PROGRAMS)
def test_a_program_that_cannot_be_traced_gets_a_sentence_with_its_line(text, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(text)
    assert PROGRAMS[text] in left(capsys, "trace", file, "--ranks", 4, "--layout", "tp=2")


def test_a_program_that_stops_in_another_module_gets_that_modules_line(tmp_path, capsys):
    helper, file = tmp_path / "steps_of_mine.py", tmp_path / "mine.py"
    helper.write_text("def program(mesh, layout):\n    return lambda: {}['rate']\n")
    file.write_text("from steps_of_mine import program\n")
    said = left(capsys, "trace", file, "--ranks", 4, "--layout", "tp=2")
    assert f"{helper}, line 2: return lambda: {{}}['rate']\nKeyError: 'rate'" in said


def test_a_program_may_hold_a_dataclass_whose_types_are_texts(tmp_path, capsys):
    file = tmp_path / "mine.py"
    lines = [
        "from __future__ import annotations",
        "from dataclasses import dataclass",
        "@dataclass",
        "class Width:",
        "    columns: int = 4",
        "def program(mesh, layout):",
        "    return lambda: Width().columns",
    ]
    file.write_text("\n".join(lines))
    main(["trace", str(file), "--ranks", "4", "--layout", "tp=2"])
    assert "most of it: nothing" in capsys.readouterr().out


def test_a_step_that_does_nothing_is_traced(tmp_path, capsys):
    file, data = tmp_path / "mine.py", tmp_path / "trace.json"
    file.write_text("def program(mesh, layout):\n    return lambda: None\n")
    main(["trace", str(file), "--ranks", "4", "--layout", "tp=2", "--json", str(data)])
    assert "most of it: nothing" in capsys.readouterr().out
    assert json.loads(data.read_text())["ranks"][0]["limit"] == "nothing"


def test_a_file_that_is_not_there_or_cannot_be_written(tmp_path, capsys):
    nothing = tmp_path / "nothing.py"
    arguments = ["--ranks", 4, "--layout", "tp=2"]
    assert left(capsys, "trace", nothing, *arguments).startswith(f"There is no file {nothing}")
    folder = tmp_path / "no_folder" / "trace.json"
    said = left(capsys, "trace", EXAMPLE, *arguments, "--json", folder)
    assert said.startswith(f"{folder} cannot be written (No such file")
    other = tmp_path / "program.txt"
    other.write_text("")
    assert "its name does not end in .py" in left(capsys, "trace", other, *arguments)


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("tq=8", "--layout has no 'tq'; it has dp, tp, pp, cp,"),
        ("tp=8,dp=4", "--layout has 32 ranks (dp 4 x cp 1 x pp 1 x tp 8), and there are 64"),
        ("tp=3", "--layout has 63 ranks"),
        ("tp=128", "--layout has 128 ranks"),
        ("tp", "--layout: tp needs a value, as in tp=..."),
        ("tp=", "--layout: tp needs a value, as in tp=..."),
        ("tp=eight", "--layout: tp is a whole number, not 'eight'."),
        ("tp=1.5", "--layout: tp is a whole number, not '1.5'."),
        ("tp=0", "tp is a whole number of at least 1, not 0."),
        ("tp=2,tp=4", "--layout has tp twice."),
        ("reshard=maybe", "--layout: reshard is true or false, not 'maybe'."),
        ("schedule=best", "schedule is one of gpipe,"),
        ("order=tp/dp", "order names each of tp, cp, dp, pp once"),
    ],
)
def test_a_layout_that_is_none_gets_a_sentence(layout, sentence, capsys):
    assert sentence in left(capsys, "trace", EXAMPLE, "--ranks", 64, "--layout", layout)


def test_a_rank_that_is_none_gets_a_sentence(capsys):
    said = left(capsys, "trace", EXAMPLE, "--ranks", 64, "--layout", "tp=8", "--rank", 64)
    assert said == "rank is a whole number from 0 to 63, not 64."


def test_what_is_typed_is_what_is_meant():
    layout = options.layout_of("tp=2, pp=4,reshard=false,order=tp/dp/cp/pp,micro_batches=8", 64)
    order = ("tp", "dp", "cp", "pp")
    assert layout == Layout(dp=8, tp=2, pp=4, reshard=False, order=order, micro_batches=8)
    assert options.layout_of("tp=2,cp=4", 64) == Layout(dp=8, tp=2, cp=4)
    model = options.model_of("8B,vocab=32000,kv_heads=4")
    assert model == estimate.Model(
        32, 4096, 32, 32000, 4, ffn=14336, gated=True, tied=False, bias=False
    )
    slow = options.hardware_of("A100,inter_bandwidth=1.25e10,hbm_bytes=40e9")
    assert slow == Hardware(312e12, 40 * 10**9, 2.039e12, 8, 300e9, 1.9e-6, 12.5e9, 8.5e-6)


QUESTION = ["--gpus", "8", "--seq", "2048", "--batch", "32"]
MODEL = "layers=8,width=1024,heads=16,vocab=32000"


def test_plans_are_what_the_search_finds_and_of_different_splits(tmp_path, capsys):
    data, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    files = ["--json", str(data), "--picture", str(picture)]
    main(["plan", "--model", MODEL, *QUESTION, "--keep", "3", "--tokens", "1e12", *files])
    shown, written = capsys.readouterr().out, json.loads(data.read_text())
    model = estimate.Model(8, 1024, 16, 32000)
    plans, refused = estimate.search(model, 8, 32, 2048, published.H100, keep=10**6)
    plans = searching.differing(plans, 3)
    assert written["refused"] == refused and len(written["plans"]) == 3
    for plan, row in zip(plans, written["plans"], strict=True):
        seconds = plan.time.seconds
        assert row["time"]["seconds"] == seconds
        assert row["memory"] == plan.memory and row["limit"] == plan.limit
        assert estimate.described(plan.layout) in shown
        assert row["tokens_per_second"] == pytest.approx(32 * 2048 / seconds)
        assert row["days"] == pytest.approx(1e12 / (32 * 2048) * seconds / 86_400)
        flops = estimate.flops(model, 2048, 32 * 2048)
        assert row["mfu"] == pytest.approx(flops / 8 / seconds / published.H100.peak)
    assert f"refused {refused['layers']}: {estimate.REASONS['layers']}" in shown
    assert picture.read_bytes().startswith(PNG)


def test_a_plan_for_ones_own_layout(tmp_path, capsys):
    data = tmp_path / "plan.json"
    typed = "dp=2,tp=2,pp=2,zero=1,micro_batch=2"
    main(["plan", "--model", MODEL, *QUESTION, "--layout", typed, "--json", str(data)])
    shown, (row,) = capsys.readouterr().out, json.loads(data.read_text())["plans"]
    model = estimate.Model(8, 1024, 16, 32000)
    layout = Layout(dp=2, tp=2, pp=2, zero=1, micro_batch=2, micro_batches=8, recompute="selective")
    time = estimate.step_time(model, layout, 2048, published.H100)
    assert (row["time"]["seconds"], row["limit"]) == (time.seconds, time.limit)
    assert row["memory"] == fullest(model, layout, 2048)
    for kind, size in row["memory"].items():
        told = kind not in (*AVOIDED, "total")
        assert told == bool(re.search(rf"{kind} +{size / 2**30:.3g}\n", shown))
    size = tensors(row["memory"]) / 2**30
    assert f"together {size:.3g} GiB, which fits in the 79.1 GiB of H100;" in shown
    assert f"most of it: {time.limit}" in shown


def test_a_layout_that_does_not_fit_gets_its_answer_too(capsys):
    main(["plan", "--model", "8b", "--seq", "8192", "--layout", "micro_batches=4"])
    shown = capsys.readouterr().out
    held = fullest(
        options.model_of("8B"), options.layout_of("micro_batches=4", **options.PLANNED), 8192
    )
    missing = tensors(held) - published.H100.hbm_bytes
    assert "on 1 GPU (H100), 4 sequences of 8,192 tokens" in shown
    assert f"does not fit: it is {missing / 2**30:.3g} GiB more than the 79.1" in shown
    assert "tokens/s" in shown and "MFU" in shown


def test_what_states_alone_need_and_how_many_gpus_hold_them(capsys):
    said = left(capsys, "plan", "--model", "8b", "--gpus", 1, "--seq", 8192, "--batch", 128)
    held, limit = estimate.memory(published.LLAMA["8B"], Layout(), 8192), published.H100.hbm_bytes
    states = held["parameters"] + held["gradients"] + held["optimizer"]
    assert f"alone need {states / 2**30:.3g} GiB, {(states - limit) / 2**30:.3g} more" in said
    assert "take at least 2 GPUs, whatever the batch" in said
    said = left(capsys, "plan", "--model", "8b", "--gpus", 2, "--seq", 131072, "--batch", 2)
    assert "the rest is activations and what is held for a moment: take more GPUs" in said


def test_only_what_is_asked_for_is_tried(tmp_path):
    data = tmp_path / "plan.json"
    asked = ["--only", "tp=1/2,zero=3", "--without", "pp,recompute=full/none/half"]
    main(["plan", "--model", MODEL, *QUESTION, *asked, "--keep", "100", "--json", str(data)])
    layouts = [plan["layout"] for plan in json.loads(data.read_text())["plans"]]
    kept = {(each["tp"], each["pp"], each["zero"], each["recompute"]) for each in layouts}
    assert kept == {(1, 1, 3, "selective"), (2, 1, 3, "selective")}


def test_float8_makes_matrices_alone_quicker_and_mfu_is_still_of_bfloat16(tmp_path):
    rows = []
    for precision in ("bf16", "fp8"):
        data = tmp_path / f"{precision}.json"
        how = ["--layout", "dp=8", "--precision", precision, "--json", str(data)]
        main(["plan", "--model", MODEL, *QUESTION, *how])
        rows.append(json.loads(data.read_text())["plans"][0])
    for kind, factor in (("matrices", catalogue.FLOAT8), ("attention", 1)):
        plain, quick = (row["time"]["parts"][kind] for row in rows)
        assert plain / quick == pytest.approx(factor)
    seconds = [row["time"]["seconds"] for row in rows]
    assert rows[1]["mfu"] / rows[0]["mfu"] == pytest.approx(seconds[0] / seconds[1])


def test_measured_steps_calibrate_a_plan(tmp_path):
    measured, data = tmp_path / "rows.csv", tmp_path / "plan.json"
    model, typed = options.model_of(MODEL), "dp=8,micro_batch=4"
    layout = options.layout_of(typed, **options.PLANNED)
    measured.write_text(f'layout,seq,seconds\n"{typed}",2048,0.05\n')
    how = ["--layout", typed, "--calibrate", str(measured), "--json", str(data)]
    main(["plan", "--model", MODEL, "--seq", "2048", *how])
    known = estimate.calibrate([estimate.Row(model, layout, 2048, 0.05)], published.H100)
    time = estimate.step_time(model, layout, 2048, published.H100, known)
    assert json.loads(data.read_text())["plans"][0]["time"]["seconds"] == time.seconds
    assert time.seconds > 1.1 * estimate.step_time(model, layout, 2048, published.H100).seconds


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("layout,seq\ndp=8,2048\n", "rows.csv, line 2: there is no seconds"),
        ("layout,seq,seconds\ndp=8,2048,1\ndp=x,2048,1\n", "line 3: --layout: dp is a whole"),
        ("layout,seq,seconds\ndp=8,2k,1\n", "line 2: the row: seq is a whole number, not '2k'."),
        ("layout,seq,seconds\ndp=8,2048,0\n", "line 2: seconds are more than 0"),
        ("layout,seq,seconds\ntp=3,2048,1\n", "line 2: 16 heads cannot be split among 3"),
        ("layout,seq,seconds\n", "There is no row to calibrate with."),
    ],
)
def test_a_row_that_is_none_gets_a_sentence(text, sentence, tmp_path, capsys):
    (tmp_path / "rows.csv").write_text(text)
    how = ["--calibrate", tmp_path / "rows.csv"]
    assert sentence in left(capsys, "plan", "--model", MODEL, *QUESTION, *how)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "layers=8,width=1024"], "--model lacks heads, vocab; it needs layers=..."),
        (["--model", "lama3-70b"], "--model does not know 'lama3-70b'; did you mean Llama-3-70B?"),
        (["--model", "9B"], "--model does not know '9B'; it knows Llama-3-8B, Llama-3-70B"),
        (["--model", MODEL, "--hardware", "B300"], "'B300'; did you mean B200 or GB200?"),
        (["--model", MODEL, "--hardware", "v5p"], "differs from one that is like it: H100,peak="),
        (["--model", MODEL, "--hardware", "H100,peak=989"], "peak is in FLOP/s, and 989.0 is too"),
        (["--model", MODEL, "--hardware", "H100,node=x"], "--hardware: node is a whole number"),
        (["--model", MODEL, "--hardware", "H100,peak=x"], "--hardware: peak is a number, not 'x'"),
        (["--model", MODEL + ",kv_heads=3"], "16 heads cannot share 3 KV heads evenly"),
        (["--model", MODEL, "--keep", "0"], "keep is a whole number of at least 1, not 0"),
        (["--model", MODEL, "--layout", "tp=3"], "--layout has 6 ranks (dp 2 x cp 1 x pp 1 x tp 3)"),
        (["--model", MODEL, "--layout", "micro_batch=5"], "has 40 sequences in a step (dp 8 x"),
        (["--model", MODEL, "--layout", "tp=8,schedule=best"], "schedule is one of gpipe,"),
        (["--model", MODEL, "--only", "tq=8"], "--only has no 'tq'; it has dp, tp, pp, cp,"),
        (["--model", MODEL, "--without", "tp="], "--without: tp needs a value, as in tp=..."),
        (["--model", MODEL, "--only", "tp=16"], "No layout of 8 GPUs is legal: change what was"),
        (["--model", MODEL, "--precision", "int4"], "--precision is one of bf16, fp8, not 'int4'."),
        (
            ["--model", MODEL, "--precision", "fp8", "--hardware", "a100"],
            "a100 computes nothing in fp8: leave --precision out.",
        ),
        (["--model", MODEL, "--tokens", "0.5"], "--tokens are counted: 15e12 for 15 trillion."),
        (["--model", MODEL, "--calibrate", "none.csv"], "none.csv cannot be read as CSV: [Errno 2]"),
        (["--model", MODEL, "--only", "tp=2,tp=4"], "--only has tp twice: write tp=1/2 for either."),
        (["--model", MODEL, "--layout", "dp=8", "--only", "tp"], "are for a search: leave them out"),
    ],
)  # fmt: skip
def test_a_question_without_an_answer_gets_a_sentence(arguments, sentence, capsys):
    assert sentence in left(capsys, "plan", *QUESTION, *arguments)


@pytest.mark.parametrize("left_out", ["gpus", "batch"])
def test_sizes_are_asked_for_where_no_layout_has_them(left_out, capsys):
    place = QUESTION.index(f"--{left_out}")
    rest = QUESTION[:place] + QUESTION[place + 2 :]
    said = left(capsys, "plan", "--model", MODEL, *rest)
    assert said == f"--{left_out} is missing; only with --layout it can be left out."


ARITHMETIC = """
import sys
from course_utils.__main__ import main

main(sys.argv[1:])
print("imported:", *{"torch", "matplotlib", "IPython"} & sys.modules.keys())
"""


@pytest.mark.parametrize("how", [[], ["--layout", "dp=8", "--json", "plan.json"]], ids=str)
def test_arithmetic_waits_for_no_pytorch(how, tmp_path):
    command = [sys.executable, "-c", ARITHMETIC, "plan", "--model", MODEL, *QUESTION, *how]
    ran = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True)
    assert "most of it" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "imported:"


def test_traced_seconds_are_those_of_each_kind():
    calls = {
        "tp": Call("all_reduce", 10**9, 1, "bfloat16", ranks=(0, 1, 2, 3)),  # one node has four
        "dp": Call("all_gather", 10**9, 1, "bfloat16", ranks=(0, 4)),
        "pp": Call("send", 10**9, 1, "bfloat16", ranks=(0, 8)),
        "4 ranks": Call("reduce_scatter", 10**9, 1, "bfloat16", ranks=(0, 1)),
        "ep": Call("barrier", 0, 0, "", sends=False, ranks=(0, 1)),
        "cp": Call("all_reduce", 10**9, 1, "bfloat16", ranks=(0,)),
    }
    record = Record(0, [], list(calls.values()))
    trace = Trace([], 10**14, 0, 0.0, {}, {}, 0, record, list(calls), [])
    known = Calibration(matrices=0.5, intra=0.5, inter=0.5)
    layout = Layout(pp=3, micro_batches=4)
    got = estimate.traced_seconds(trace, layout, SMALL, known)
    assert got == pytest.approx(
        {
            "matrices": 2.0,
            "tensor": 6 * 5e-6 + 1.5 * 1e9 / 50e9,
            "data": 1e-5 + 0.5 * 2e9 / 5e9,
            "messages": 1e-5 + 1e9 / 5e9,
            "other groups": 5e-6 + 0.5 * 1e9 / 50e9,
            "bubble": (2.0 + got["tensor"]) * 2 / 4,
        }
    )
    no_stages = Trace([], 10**14, 0, 0.0, {}, {}, 0, Record(0, [], []), [], [])
    assert estimate.traced_seconds(no_stages, layout, SMALL, known) == {"matrices": 2.0}
