"""Runs that were measured, as rows of `calibrate` with what memory was printed beside them.

`published` has the papers that chapter 12 asks for; here are the others. Where a source does not
print what a Layout needs, the function says what was assumed.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace

import course_planner as estimate
from course_planner import Layout, Model, Row, catalogue, published
from course_planner.published import A100, H100, gpt, megatron, table

GIB = 2**30
SOURCES = {
    "Megatron SC21": A100,
    "MT-NLG": A100,
    "Korthikanti": A100,
    "zero bubble": A100,
    "Megatron 2020": A100,
    "MPT A100": A100,
    "torchtitan": H100,
    "Llama 3": H100,
    "Megatron-Core": H100,
    "NeMo 24.12": H100,
    "MPT H100": H100,
    "nanotron": H100,
    "DeepSeek-V3": H100,
}


@dataclass(frozen=True)
class Run:
    """A row, and the bytes of its fullest rank where they were printed."""

    row: Row
    memory: float | None = None


def runs(source: str) -> list[Run]:
    """All measured steps of one of SOURCES."""
    read = {
        "MT-NLG": _mt_nlg,
        "Korthikanti": _korthikanti,
        "zero bubble": _zero_bubble,
        "Megatron 2020": _megatron_2020,
        "MPT A100": lambda: _mpt("A100"),
        "MPT H100": lambda: _mpt("H100"),
        "torchtitan": _torchtitan,
        "Megatron-Core": _megatron_core,
        "NeMo 24.12": _nemo,
        "nanotron": _nanotron,
        "DeepSeek-V3": _deepseek,
    }
    if source not in read:
        return [Run(row) for row in published.rows(source)]
    return list(read[source]())


def _torchtitan() -> Iterator[Run]:
    """Memory is what the allocator reserved, in GiB."""
    data = table("09_torchtitan.json")
    held = {row["id"]: row.get("mem_GiB") for row in data["rows"] + data["old_rows"]}
    for row in published.rows("torchtitan"):
        yield Run(row, held[row.name] and held[row.name] * GIB)


def _mt_nlg() -> Iterator[Run]:
    """2201.11990, section 2.4: on DeepSpeed, whose stages send whole messages."""
    data = table("11_misc.json")["mtnlg"]
    shape, batch = data["model"], data["model"]["gbs"]
    for row in data["rows"]:
        layout = megatron(row["gpus"], row["tp"], row["pp"], 1, batch, sequence_parallel=False)
        model = gpt(shape["layers"], shape["hidden"], shape["heads"])
        yield Run(Row(model, layout, shape["seq"], row["iter_s"], name=row["id"]))


def _megatron_2020() -> Iterator[Run]:
    """Megatron-LM's table of 2020 for A100; one micro-batch."""
    for row in table("11_misc.json")["megatron_2020"]["rows"]:
        model = gpt(row["layers"], row["hidden"], row["heads"], row["seq"])
        for name, batch in (("A100_B16", 16), ("A100_dp128_B2048", 2048)):
            run = row[name]
            dp = run["gpus"] // row["tp"]
            layout = megatron(
                run["gpus"], row["tp"], 1, batch // dp, batch, sequence_parallel=False
            )
            seconds = run["iter_ms"] / 1000
            yield Run(Row(model, layout, row["seq"], seconds, name=f"{row['id']}.{name}"))


def _korthikanti() -> Iterator[Run]:
    """2205.05198, table 5, both ways, and section 6.3's 530B with one and with eight replicas."""
    data = table("03_korthikanti.json")
    ways = {
        "full_recompute": {"sequence_parallel": False},
        "present_work": {"recompute": "selective"},
    }
    for row in data["table5"]:
        model = gpt(row["layers"], row["hidden"], row["heads"])
        sizes = [row[k] for k in ("gpus", "tp", "pp", "micro_batch", "global_batch")]
        for way, how in ways.items():
            layout = megatron(*sizes, row["interleave_m"], **how)
            seconds = row["published"][f"iter_s_{way}"]
            yield Run(Row(model, layout, row["seq"], seconds, name=f"{row['id']}.{way}"))
    for gpus, batch, seconds in ((280, 280, 37.83), (2240, 2240, 39.15)):
        layout = megatron(gpus, 8, 35, 1, batch, 3, **ways["present_work"])
        name = f"korth.530B.{gpus}"
        yield Run(Row(gpt(105, 20480, 128), layout, 2048, seconds, name=name))


SCHEDULES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zb-h1", "ZB-2p": "zb-h2"}


def _zero_bubble() -> Iterator[Run]:
    """2401.10241, tables 4 and 7: pipelines without tensor or data ranks, nothing recomputed.

    The vocabulary is not printed; 32,000 is assumed.
    """
    tables = table("05_zero_bubble.json")
    shapes = tables["table3"]

    def row(name, gpus, m, micro_batch, schedule, rate, ident) -> Row:
        shape = shapes[name]
        model = gpt(shape["layers"], shape["hidden"], shape["heads"], shape["seq"], 32000)
        chunks = shape["v_interleave"] if schedule == "interleaved" else 1
        layout = Layout(
            pp=gpus, micro_batch=micro_batch, micro_batches=m, schedule=schedule, chunks=chunks
        )
        return Row(model, layout, shape["seq"], m * micro_batch / rate / gpus, name=ident)

    for r in tables["table4"]:
        rate, way = r["published_samples_per_gpu_s"], SCHEDULES[r["schedule"]]
        found = row(r["model"], r["gpus"], r["m"], r["micro_batch"], way, rate, r["id"])
        yield Run(found, r["published_mem_GB"] * 1e9)
    for r in tables["table7"]:
        for column, schedule in (("ZB1p", "zb-h1"), ("f1b", "1f1b")):
            for b, rate in zip(r["b"], r[column]):
                ident = f"zb.T7.{r['model']}.b{b}.{column}"
                yield Run(row(r["model"], r["gpus"], r["m"], b, schedule, rate, ident))


def _mpt(gpu: str) -> Iterator[Run]:
    """llm-foundry's runs of MPT under FSDP, all of which fitted: ALiBi, no biases, flash attention."""
    for at, row in enumerate(table("12_mpt.json")["rows"]):
        if not row["gpu"].startswith(gpu):
            continue
        sizes = (row[name] for name in ("layers", "width", "heads", "vocab"))
        layout = Layout(
            dp=row["gpus"],
            zero=3,
            micro_batch=row["micro_batch"],
            micro_batches=row["micro_batches"],
            recompute="full" if row["full_recomputation"] else "selective",
        )
        tokens = layout.sequences() * row["seq"] / row["gpus"]
        seconds = tokens / row["tokens_per_second_per_gpu"]
        name = f"mpt.{at}.{row['model']}.{row['gpus']}.{row['seq']}"
        yield Run(Row(Model(*sizes, bias=False), layout, row["seq"], seconds, name=name))


def _megatron_core() -> Iterator[Run]:
    """Megatron-Core 0.8: ZeRO 1; the micro-batch is not printed and taken to be 1."""
    for row in table("11_misc.json")["megatron_core_h100"]["rows"]:
        model = replace(
            gpt(row["layers"], row["hidden"], row["heads"], row["seq"], row["vocab"]), tied=False
        )
        per_rank = row["global_batch"] // row["dp"]
        micro_batch = 1 if row["pp"] > 1 else min(per_rank, 4)
        layout = Layout(
            dp=row["dp"],
            tp=row["tp"],
            pp=row["pp"],
            zero=1,
            micro_batch=micro_batch,
            micro_batches=per_rank // micro_batch,
            recompute="selective",
        )
        yield Run(Row(model, layout, row["seq"], row["computed"]["iter_s"], name=row["id"]))


LLAMA2 = {
    "LLAMA2-7B": catalogue.model_called("Llama-2-7B"),
    "LLAMA2-13B": catalogue.model_called("Llama-2-13B"),
    "LLAMA2-70B": catalogue.model_called("Llama-2-70B"),
}


def _nemo() -> Iterator[Run]:
    """NeMo 24.12 in FP8 on H100, with cuDNN's attention; the distributed optimizer is assumed."""
    for row in table("11_misc.json")["nemo_2412"]["rows"]:
        dp = row["gpus"] // row["tp"] // row["pp"]
        chunks, model = row["vp"], LLAMA2[row["model"]]
        layout = Layout(
            dp=dp,
            tp=row["tp"],
            pp=row["pp"],
            zero=1 if dp > 1 else 0,
            micro_batches=row["gbs"] // dp,
            chunks=model.layers // row["pp"] if chunks > 1 else 1,
            schedule="interleaved" if chunks > 1 else "1f1b",
            recompute="selective",
        )
        if chunks > 1:
            layout = replace(layout, chunks=chunks)
        seconds = row["gbs"] * row["seq"] / row["gpus"] / row["tok_s_gpu"]
        hardware = catalogue.in_float8(replace(H100, flash=1.0))
        yield Run(Row(model, layout, row["seq"], seconds, hardware, row["id"]))


def _deepseek() -> Iterator[Run]:
    """DeepSeek-V3's own run (2412.19437): 180,000 GPU-hours a trillion tokens, batches of 15,360.

    DualPipe stands as zb-h1.
    """
    data = table("11_misc.json")["deepseek_v3"]
    model, seq = catalogue.model_called("DeepSeek-V3"), data["model"]["seq"]
    layout = Layout(
        dp=128,
        pp=16,
        ep=64,
        zero=1,
        micro_batches=15360 // 128,
        schedule="zb-h1",
        recompute="selective",
        order=("tp", "cp", "dp", "pp"),
    )
    tokens = layout.sequences() * seq
    seconds = data["published"]["hours_per_Ttok"] * 3600 / 1e12 * tokens / layout.gpus
    hardware = catalogue.in_float8(replace(H100, intra_bandwidth=160e9))
    yield Run(Row(model, layout, seq, seconds, hardware, "deepseek-v3"))


NANOTRON = {
    "1B": Model(16, 2048, 32, 131072, ffn=8192, gated=True, bias=False),
    "3B": Model(28, 3072, 32, 131072, ffn=8192, gated=True, bias=False),
    "8B": Model(32, 4096, 32, 131072, ffn=14336, gated=True, bias=False, tied=False),
    "80B": Model(80, 8192, 64, 131072, ffn=28672, gated=True, bias=False, tied=False),
}


def _nanotron() -> Iterator[Run]:
    """The Ultra-Scale Playbook's runs on 8 to 512 H100: those that ended.

    Memory is printed in GiB. The best runs of 8B and 80B are in the playbook's own table.
    """
    with (published.FOLDER / "10b_nanotron_bench.csv").open() as file:
        found = [row for row in csv.DictReader(file) if row["status"] == "ok"]
    best = table("10_ultrascale_playbook.json")["bench"]["best"]
    for name, row in best.items():
        model, _ = name.split(".")
        if model in ("8B", "80B"):
            found.append(row | {"id": name, "model": model, "seq": 4096})
    for row in found:
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
        timed = Row(NANOTRON[row["model"]], layout, seq, seconds, name=row["id"])
        yield Run(timed, float(row["mem_GB"]) * GIB)


def flops_of(row: Row) -> float:
    """The FLOP/s of a GPU that a step reached."""
    tokens = row.layout.sequences() * row.seq
    return estimate.flops(row.model, row.seq, tokens) / row.layout.gpus / row.seconds
