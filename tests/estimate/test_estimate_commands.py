"""python -m course_utils trace and plan: what they print, write and draw, and what they refuse."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

import course_planner as estimate
from course_planner import Calibration, Hardware, Layout, Trace, example, options, published
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
    assert f"holds at most {row['peak'] / 1e9:.3g} GB" in shown
    assert "which fits in 85.9 GB of H100" in shown
    assert picture.read_bytes().startswith(PNG)


def test_a_trace_that_does_not_fit_says_so(tmp_path, capsys):
    main(
        ["trace", str(EXAMPLE), "--ranks", "1", "--layout", "", "--hardware", "H100,hbm_bytes=1e9"]
    )
    assert "does not fit in 1 GB of H100,hbm_bytes=1e9" in capsys.readouterr().out


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
        ("tp=8,dp=4", "--layout has 32 ranks (dp 4 x cp 1 x pp 1 x tp 8) and --ranks is 64"),
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
        32, 4096, 32, 32000, 4, 14336, gated=True, tied=False, bias=False
    )
    slow = options.hardware_of("A100,inter_bandwidth=1.25e10,hbm_bytes=40e9")
    assert slow == Hardware(312e12, 40 * 10**9, 2.0e12, 8, 300e9, 1.9e-6, 12.5e9, 8.5e-6)


QUESTION = ["--gpus", "8", "--seq", "2048", "--batch", "32"]
MODEL = "layers=8,width=1024,heads=16,vocab=32000"


def test_a_plan_is_what_the_search_finds(tmp_path, capsys):
    data, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    files = ["--json", str(data), "--picture", str(picture)]
    main(["plan", "--model", MODEL, *QUESTION, "--keep", "3", *files])
    shown, written = capsys.readouterr().out, json.loads(data.read_text())
    model = estimate.Model(8, 1024, 16, 32000)
    plans, refused = estimate.search(model, 8, 32, 2048, published.H100, keep=3)
    assert written["refused"] == refused and len(written["plans"]) == 3
    for plan, row in zip(plans, written["plans"], strict=True):
        assert row["time"]["seconds"] == plan.time.seconds
        assert row["memory"] == plan.memory and row["limit"] == plan.limit
        assert estimate.described(plan.layout) in shown
    assert f"refused {refused['layers']}: {estimate.REASONS['layers']}" in shown
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "layers=8,width=1024"], "--model lacks heads, vocab; it needs layers=..."),
        (["--model", "9B"], "--model does not know '9B'; it knows 8B, 70B, 405B"),
        (
            ["--model", MODEL, "--hardware", "B200"],
            "--hardware does not know 'B200'; it knows A100",
        ),
        (["--model", MODEL, "--hardware", "H100,peak=989"], "peak is in FLOP/s, and 989.0 is too"),
        (["--model", MODEL, "--hardware", "H100,node=x"], "--hardware: node is a whole number"),
        (["--model", MODEL, "--hardware", "H100,peak=x"], "--hardware: peak is a number, not 'x'"),
        (["--model", MODEL + ",kv_heads=3"], "16 heads cannot share 3 KV heads evenly"),
        (["--model", MODEL, "--keep", "0"], "keep is a whole number of at least 1, not 0"),
        (["--model", "405B"], "No layout is legal and fits"),
    ],
)
def test_a_question_without_an_answer_gets_a_sentence(arguments, sentence, capsys):
    assert sentence in left(capsys, "plan", *QUESTION, *arguments)


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
    trace = Trace([], 10**14, 0, 0.0, {}, {}, 0, record, list(calls))
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
    no_stages = Trace([], 10**14, 0, 0.0, {}, {}, 0, Record(0, [], []), [])
    assert estimate.traced_seconds(no_stages, layout, SMALL, known) == {"matrices": 2.0}
