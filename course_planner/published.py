"""The steps that papers printed, as rows for `calibrate`, and the clusters they ran on.

data/published holds the tables, each with its source. Where a paper does not print what a Layout
needs, the function here says what was assumed.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from course_planner import catalogue, counting
from course_planner.calibrating import Row
from course_planner.descriptions import Layout, Model

# The project is installed in place (pip install -e .), so its data lies beside the package.
FOLDER = Path(__file__).resolve().parents[1] / "data" / "published"

A100, H100 = map(catalogue.hardware_called, ("A100", "H100"))
HARDWARE = {
    "Megatron SC21": A100,
    "MT-NLG": A100,
    "Korthikanti": A100,
    "zero bubble": A100,
    "torchtitan": H100,
    "nanotron": H100,
    "Llama 3": H100,
}


def rows(paper: str) -> list[Row]:
    """The measured steps of one of HARDWARE's papers."""
    read = {
        "Megatron SC21": _megatron,
        "MT-NLG": _mt_nlg,
        "Korthikanti": _korthikanti,
        "zero bubble": _zero_bubble,
        "torchtitan": _torchtitan,
        "nanotron": _nanotron,
        "Llama 3": _llama3,
    }
    return list(read[paper]())


def _table(name: str) -> dict:
    return json.loads((FOLDER / name).read_text())


def _gpt(layers: int, width: int, heads: int, seq: int = 2048, vocab: int = 51200) -> Model:
    return Model(layers, width, heads, vocab, positions=seq)


def _megatron() -> Iterator[Row]:
    """2104.04473, tables 1 and 2; seconds follow from the FLOP/s and the paper's FLOPs.

    Table 2's GPT-3 prints 96 model-parallel GPUs: 8 x 12, as elsewhere in the paper, without
    interleaving.
    """
    tables = _table("02_megatron_sc21.json")
    for row in tables["table1"]:
        model = _gpt(row["layers"], row["hidden"], row["heads"])
        layout = _old_megatron(
            row["gpus"],
            row["tp"],
            row["pp"],
            row["micro_batch"],
            row["global_batch"],
            row["virtual_chunks_v"],
        )
        yield _from_rate(row, model, layout, row["published"]["tflops_per_gpu"])
    for row in tables["table2"]:
        layout = _old_megatron(row["gpus"], 8, 12, row["micro_batch"], row["global_batch"])
        yield _from_rate(row, _gpt(96, 12288, 96), layout, row["published_tflops_per_gpu"])


def _old_megatron(gpus, tp, pp, micro_batch, global_batch, chunks=1, **more) -> Layout:
    """Megatron-LM with full recomputation.

    Its messages between stages are cut into 1 / t (scatter/gather, section 4.1), as with sequence
    parallelism, which is younger; that stands for it.
    """
    dp = gpus // tp // pp
    how = {"recompute": "full"} | more
    return Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        micro_batch=micro_batch,
        micro_batches=global_batch // dp // micro_batch,
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
        **how,
    )


def _from_rate(row: dict, model: Model, layout: Layout, tflops: float) -> Row:
    flops = counting.flops(model, 2048, layout.sequences() * 2048, "sc21")
    return Row(model, layout, 2048, flops / layout.gpus / tflops / 1e12, name=row["id"])


def _mt_nlg() -> Iterator[Row]:
    """2201.11990, section 2.4: on DeepSpeed, whose stages send whole messages."""
    table = _table("11_misc.json")["mtnlg"]
    shape, batch = table["model"], table["model"]["gbs"]
    for row in table["rows"]:
        layout = _old_megatron(row["gpus"], row["tp"], row["pp"], 1, batch, sequence_parallel=False)
        model = _gpt(shape["layers"], shape["hidden"], shape["heads"])
        yield Row(model, layout, shape["seq"], row["iter_s"], name=row["id"])


def _korthikanti() -> Iterator[Row]:
    """2205.05198, table 5, both ways, and section 6.3's 530B with one and with eight replicas."""
    table = _table("03_korthikanti.json")
    ways = {
        "full_recompute": {"sequence_parallel": False},
        "present_work": {"recompute": "selective"},
    }
    for row in table["table5"]:
        model = _gpt(row["layers"], row["hidden"], row["heads"])
        sizes = [row[k] for k in ("gpus", "tp", "pp", "micro_batch", "global_batch")]
        for way, how in ways.items():
            layout = _old_megatron(*sizes, row["interleave_m"], **how)
            seconds = row["published"][f"iter_s_{way}"]
            yield Row(model, layout, row["seq"], seconds, name=f"{row['id']}.{way}")
    for gpus, batch, seconds in ((280, 280, 37.83), (2240, 2240, 39.15)):
        layout = _old_megatron(gpus, 8, 35, 1, batch, 3, **ways["present_work"])
        yield Row(_gpt(105, 20480, 128), layout, 2048, seconds, name=f"korth.530B.{gpus}")


SCHEDULES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zb-h1", "ZB-2p": "zb-h2"}


def _zero_bubble() -> Iterator[Row]:
    """2401.10241, tables 4 and 7: pipelines without tensor or data ranks, nothing recomputed.

    The vocabulary is not printed; 32,000 is assumed.
    """
    tables = _table("05_zero_bubble.json")
    shapes = tables["table3"]

    def row(name, gpus, m, micro_batch, schedule, rate, ident) -> Row:
        shape = shapes[name]
        model = _gpt(shape["layers"], shape["hidden"], shape["heads"], shape["seq"], 32000)
        chunks = shape["v_interleave"] if schedule == "interleaved" else 1
        layout = Layout(
            pp=gpus, micro_batch=micro_batch, micro_batches=m, schedule=schedule, chunks=chunks
        )
        return Row(model, layout, shape["seq"], m * micro_batch / rate / gpus, name=ident)

    for r in tables["table4"]:
        rate, way = r["published_samples_per_gpu_s"], SCHEDULES[r["schedule"]]
        yield row(r["model"], r["gpus"], r["m"], r["micro_batch"], way, rate, r["id"])
    for r in tables["table7"]:
        for column, schedule in (("ZB1p", "zb-h1"), ("f1b", "1f1b")):
            for b, rate in zip(r["b"], r[column]):
                ident = f"zb.T7.{r['model']}.b{b}.{column}"
                yield row(r["model"], r["gpus"], r["m"], b, schedule, rate, ident)


LLAMA = {name: catalogue.model_called(name) for name in ("8B", "70B", "405B", "L2-13B")}
FLOAT8 = 1.4


def _torchtitan() -> Iterator[Row]:
    """torchtitan's benchmarks: H100 of 500 W, whose peak is taken to be the usual one.

    What AC calls selective
    recomputes every second matrix, or every second layer; it stands as "selective" here. The
    pipelined row has as many micro-batches as stages, which was the default.
    """
    table = _table("09_torchtitan.json")
    for row in table["rows"] + table["old_rows"]:
        sizes = {kind: _size(row["parallel"], kind) for kind in ("FSDP", "TP", "PP", "CP")}
        pp, batch = sizes["PP"], row["local_batch"]
        layout = Layout(
            dp=sizes["FSDP"],
            tp=sizes["TP"],
            pp=pp,
            cp=sizes["CP"],
            zero=3,
            micro_batch=max(batch // pp, 1),
            micro_batches=pp,
            recompute={"full": "full", "none": "none"}.get(row["ac"], "selective"),
            reshard=pp == 1,
        )
        hardware = A100 if "A100" in row["hw"] else H100
        if row.get("precision") == "fp8":
            hardware = replace(hardware, peak=catalogue.FLOAT8 * hardware.peak)
        tokens = row.get("tps_per_gpu") or row["wps_per_gpu"]
        seconds = row["global_batch"] * row["seq"] / row["gpus"] / tokens
        yield Row(LLAMA[row["model"]], layout, row["seq"], seconds, hardware, row["id"])


def _size(text: str, kind: str) -> int:
    """The number behind `kind` in, for instance, "FSDP8 TP8 PP8"; 1 where it is not there."""
    found = [word.removeprefix(kind) for word in text.split() if word.startswith(kind)]
    return int(found[0]) if found else 1


NANOTRON = {
    "1B": {"layers": 16, "width": 2048, "ffn": 8192},
    "3B": {"layers": 28, "width": 3072, "ffn": 8192},
}


def _nanotron() -> Iterator[Row]:
    """The Ultra-Scale Playbook's runs on 8 to 512 H100: those that ended."""
    with (FOLDER / "10b_nanotron_bench.csv").open() as file:
        for row in csv.DictReader(file):
            if row["status"] != "ok":
                continue
            model = Model(heads=32, vocab=131072, gated=True, bias=False, **NANOTRON[row["model"]])
            layout = Layout(
                dp=int(row["dp"]),
                tp=int(row["tp"]),
                pp=int(row["pp"]),
                zero=int(row["zero"]),
                micro_batch=int(row["mbs"]),
                micro_batches=int(row["grad_acc"]),
                recompute="selective",
                order=("tp", "dp", "cp", "pp"),
            )
            seq = int(row["seq"])
            seconds = layout.sequences() * seq / layout.gpus / float(row["tok_s_gpu"])
            yield Row(model, layout, seq, seconds, name=row["id"])


def _llama3() -> Iterator[Row]:
    """2407.21783, table 4. A chunk of one layer: the first has the embedding alone (3.3.2)."""
    for row in _table("04_llama3.json")["table4"]:
        layout = Layout(
            dp=row["dp"],
            tp=row["tp"],
            pp=row["pp"],
            cp=row["cp"],
            zero=3,
            reshard=False,
            micro_batches=row["batch_per_dp"],
            chunks=8,
            schedule="interleaved",
            recompute="selective",
            order=("tp", "cp", "pp", "dp"),
        )
        model, seq = LLAMA["405B"], row["seq"]
        flops = counting.flops(model, seq, layout.sequences() * seq)
        seconds = flops / layout.gpus / row["published"]["tflops_per_gpu"] / 1e12
        yield Row(model, layout, seq, seconds, name=row["id"])
