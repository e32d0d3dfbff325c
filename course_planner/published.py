"""Steps that papers printed, as rows for `calibrate`, and the clusters they ran on.

data/published holds the tables, each with its source. Where a paper does not print what a Layout
needs, the function here says what was assumed.
"""

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


def rows(paper: str) -> list[Row]:
    """The measured steps of a paper that chapter 12 asks for."""
    read = {"Megatron SC21": _megatron, "torchtitan": _torchtitan, "Llama 3": _llama3}
    return list(read[paper]())


def table(name: str) -> dict:
    return json.loads((FOLDER / name).read_text())


def gpt(layers: int, width: int, heads: int, seq: int = 2048, vocab: int = 51200) -> Model:
    return Model(layers, width, heads, vocab, positions=seq)


def _megatron() -> Iterator[Row]:
    """2104.04473, tables 1 and 2; seconds follow from the FLOP/s and the paper's FLOPs.

    Table 2's GPT-3 prints 96 model-parallel GPUs: 8 x 12, as elsewhere in the paper, without
    interleaving.
    """
    tables = table("02_megatron_sc21.json")
    for row in tables["table1"]:
        model = gpt(row["layers"], row["hidden"], row["heads"])
        layout = megatron(
            row["gpus"],
            row["tp"],
            row["pp"],
            row["micro_batch"],
            row["global_batch"],
            row["virtual_chunks_v"],
        )
        yield _from_rate(row, model, layout, row["published"]["tflops_per_gpu"])
    for row in tables["table2"]:
        layout = megatron(row["gpus"], 8, 12, row["micro_batch"], row["global_batch"])
        yield _from_rate(row, gpt(96, 12288, 96), layout, row["published_tflops_per_gpu"])


def megatron(gpus, tp, pp, micro_batch, global_batch, chunks=1, **more) -> Layout:
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


LLAMA = {name: catalogue.model_called(name) for name in ("8B", "70B", "405B", "L2-13B")}


def _torchtitan() -> Iterator[Row]:
    """torchtitan's benchmarks: H100 of 500 W, whose peak is taken to be the usual one.

    What AC calls selective recomputes every second matrix, or every second layer, which is as much. The
    pipelined row has as many micro-batches as stages, which was the default.
    """
    data = table("09_torchtitan.json")
    for row in data["rows"] + data["old_rows"]:
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
            recompute={"full": "full", "none": "selective"}.get(row["ac"], "half"),
            reshard=pp == 1,
        )
        hardware = A100 if "A100" in row["hw"] else H100
        if "96GB" in row["hw"]:
            hardware = replace(hardware, hbm_bytes=96 * 2**30)
        if row.get("precision") == "fp8":
            hardware = catalogue.in_float8(hardware)
        tokens = row.get("tps_per_gpu") or row["wps_per_gpu"]
        seconds = row["global_batch"] * row["seq"] / row["gpus"] / tokens
        yield Row(LLAMA[row["model"]], layout, row["seq"], seconds, hardware, row["id"])


def _size(text: str, kind: str) -> int:
    """The number behind `kind` in, for instance, "FSDP8 TP8 PP8"; 1 where it is not there."""
    found = [word.removeprefix(kind) for word in text.split() if word.startswith(kind)]
    return int(found[0]) if found else 1


def _llama3() -> Iterator[Row]:
    """2407.21783, table 4. A chunk of one layer: the first has the embedding alone (3.3.2)."""
    for row in table("04_llama3.json")["table4"]:
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
