"""The estimates against printed tables, to the last printed digit, and against counts.

data/published holds the tables; each file says which paper it was transcribed from.
"""

import json
from dataclasses import replace
from decimal import ROUND_HALF_EVEN, ROUND_HALF_UP, Decimal
from itertools import product
from pathlib import Path

import pytest
from torch import nn

import course_planner as estimate
from course_planner import Hardware, Layout, Model
from course_planner.memory import fits, fullest
from course_planner.stages import stages_of
from course_utils.lesson import schedules
from tests.benchmarks import bench_plans, papers

PUBLISHED = Path(__file__).parents[2] / "data" / "published"
GIB = 2**30


def table(name: str) -> dict:
    return json.loads((PUBLISHED / name).read_text(), parse_float=Decimal)


def rows(name: str, *keys: str) -> list:
    found = table(name)
    for key in keys:
        found = found[key]
    return [pytest.param(row, id=row["id"]) for row in found]


def printed(value: float, as_in: Decimal | int) -> bool:
    """Whether `value`, rounded to as many places, is what the table has; a half goes either way."""
    wanted = Decimal(as_in)
    digit = Decimal(1).scaleb(min(wanted.normalize().as_tuple().exponent, 0))
    exact = Decimal(repr(round(float(value), 9)))
    return wanted in {exact.quantize(digit, way) for way in (ROUND_HALF_UP, ROUND_HALF_EVEN)}


def gpt(row: dict, layers: int | None = None, **more) -> Model:
    return Model(
        layers or row["layers"],
        row["hidden"],
        row["heads"],
        row["vocab"],
        positions=row["seq"],
        **more,
    )


def llama(layers, width, heads, ffn, vocab=128256) -> Model:
    shape = {"kv_heads": 8, "ffn": ffn, "gated": True, "tied": False, "bias": False}
    return Model(layers, width, heads, vocab, **shape)


LLAMA = {
    "8B": llama(32, 4096, 32, 14336),
    "70B": llama(80, 8192, 64, 28672),
    "405B": llama(126, 16384, 128, 53248),
}

# ---- ZeRO ----------------------------------------------------------------------------------------

STAGES = {"baseline": 0, "Pos": 1, "Pos+g": 2, "Pos+g+p": 3}


@pytest.mark.parametrize("row", rows("01_zero.json", "table1"))
def test_zero_table_1(row):
    held = estimate.model_states(int(row["psi"]), row["dp"], STAGES[row["stage"]])
    assert printed(held / 1e9, row["published_GB"])


@pytest.mark.parametrize("row", rows("01_zero.json", "table2"))
def test_zero_table_2(row):
    """The most parameters that fit: K bytes a parameter are what one parameter of 1e9 needs."""
    each = estimate.model_states(10**9, row["dp"], STAGES[row["config"]]) / 1e9
    assert printed(row["gpu_mem_GB"] * row["mp"] / each, row["published_max_params_B"])


def test_zero_figure_1():
    figure = table("01_zero.json")["fig1"]
    for stage, name in enumerate(("baseline", "Pos", "Pos_g", "Pos_g_p")):
        held = estimate.model_states(int(figure["psi"]), figure["N"], stage, figure["K"])
        assert printed(held / 1e9, figure["GB"][name])


def test_what_zero_sends():
    """1910.02054, section 7: 2, 2, 2 and 3 times the parameters, times the ring's (n - 1) / n."""
    model = Model(4, 64, 4, 256)
    for zero, times in ((0, 2), (1, 2), (2, 2), (3, 3)):
        layout = Layout(dp=8, zero=zero)
        sent = sum(call.sent for call in estimate.traffic(model, layout, 32))
        root = 256 * 64 + 2 * 64  # FSDP keeps it between forward and backward
        elements = times * estimate.parameters(model) - (root if zero == 3 else 0)
        assert sent == 2 * elements * 7 // 8


# ---- Megatron-LM ---------------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows("02_megatron_sc21.json", "table1"))
def test_megatron_table_1(row):
    model, (batch, seq, h, v) = (
        gpt(row),
        (row[k] for k in ("global_batch", "seq", "hidden", "vocab")),
    )
    assert printed(estimate.parameters(model) / 1e9, row["params_B"])
    got = estimate.flops(model, seq, batch * seq, "sc21")
    layers = 96 * row["layers"] * h**2 + 16 * row["layers"] * seq * h  # of eq. 3, a token
    assert got == batch * seq * (layers + 6 * h * v)
    assert got == pytest.approx(float(row["computed"]["flops_per_iter"]), rel=1e-15)
    bubble = estimate.bubble(
        "interleaved" if row["virtual_chunks_v"] > 1 else "1f1b",
        row["pp"],
        row["num_microbatches"],
        chunks=row["virtual_chunks_v"],
    )
    assert bubble / (1 - bubble) == pytest.approx(float(row["computed"]["bubble_frac"]), abs=1e-12)
    layout = Layout(dp=row["dp"], tp=row["tp"], pp=row["pp"])
    assert layout.gpus == row["gpus"]


def test_megatron_2020():
    for row in table("11_misc.json")["megatron_2020"]["rows"]:
        model = gpt(row)
        assert printed(estimate.parameters(model) / 1e9, row["params_B"])
        for name, batch in (("V100_DGX2_B8", 8), ("A100_B16", 16), ("A100_dp128_B2048", 2048)):
            run = row[name]
            flops = estimate.flops(model, row["seq"], batch * row["seq"], "sc21")
            rate = flops / (run["iter_ms"] / 1000) / run["gpus"] / 1e12
            assert printed(rate, run["tflops_computed"])


def test_what_tensor_ranks_send():
    """2104.04473, section 3.2: 8 b s h (t - 1) / t numbers a layer and micro-batch, either way."""
    model, b, s, h, t = Model(6, 64, 8, 256), 2, 32, 64, 4
    for sequence_parallel in (True, False):
        layout = Layout(tp=t, pp=3, micro_batch=b, sequence_parallel=sequence_parallel)
        sent = sum(c.sent for c in estimate.traffic(model, layout, s, stage=1) if c.group == "tp")
        assert sent == 2 * 2 * 8 * b * s * h * (t - 1) // t  # layers, bytes
        messages = [c for c in estimate.traffic(model, layout, s, stage=1) if c.group == "pp"]
        assert {c.sent for c in messages} == {2 * b * s * h // (t if sequence_parallel else 1)}
        assert [c.when for c in messages] == ["forward", "backward"]


def test_chunks_send_more_messages():
    model = Model(8, 64, 8, 256)
    layout = Layout(pp=4, chunks=2, micro_batches=8, schedule="interleaved")
    for stage, wanted in ((0, [16, 8]), (1, [16, 16]), (3, [8, 16])):
        calls = estimate.traffic(model, layout, 32, stage)
        assert [c.calls for c in calls if c.group == "pp"] == wanted


# ---- activations ---------------------------------------------------------------------------------

WAYS = {
    "no_par": (False, False, "none"),
    "tp": (True, False, "none"),
    "tp_sp": (True, True, "none"),
    "tp_selective": (True, False, "selective"),
    "tp_sp_selective": (True, True, "selective"),
    "full": (True, False, "full"),
}


@pytest.mark.parametrize("row", rows("03_korthikanti.json", "table5"))
def test_korthikanti_a_layer(row):
    shape = [row[key] for key in ("seq", "micro_batch", "hidden", "heads")]
    got = {
        name: estimate.activations_per_layer(*shape, row["tp"] if split else 1, sequence, recompute)
        for name, (split, sequence, recompute) in WAYS.items()
    }
    computed = row["computed"]
    assert got == computed["per_layer_bytes"]
    for name, share in computed["pct_of_tp_baseline"].items():
        assert printed(100 * got[name] / got["tp"], share)


@pytest.mark.parametrize("row", rows("03_korthikanti.json", "table5"))
def test_korthikanti_the_first_stage(row):
    chunks = row["interleave_m"]
    layout = Layout(
        tp=row["tp"],
        pp=row["pp"],
        micro_batch=row["micro_batch"],
        micro_batches=row["global_batch"] // row["micro_batch"],
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
    )
    model, seq = gpt(row), row["seq"]
    selective = estimate.memory(model, replace(layout, recompute="selective"), seq)
    total = row["computed"]["first_stage_total_GiB_tp_sp_selective"]
    assert printed(selective["activations"] / GIB, total)
    held = estimate.memory(model, layout, seq)
    more = 1 + (row["pp"] - 1) / (row["pp"] * chunks)  # the paper's L / t layers, without chunks
    share = held["temporary"] / held["activations"] * more
    assert printed(share, row["computed"]["extra_terms_frac_eq43"])


@pytest.mark.parametrize("row", rows("03_korthikanti.json", "table5"))
def test_korthikanti_utilisation(row):
    """The paper's times are rounded; its utilisations follow within what that leaves open."""
    model, tokens = gpt(row), row["global_batch"] * row["seq"]
    for name, convention in (("mfu_pct", "korthikanti"), ("hfu_pct", "selective")):
        flops = estimate.flops(model, row["seq"], tokens, convention)
        seconds = float(row["published"]["iter_s_present_work"])
        share = 100 * flops / (seconds * row["gpus"] * 312e12)
        assert printed(share, row["computed"][name])
        low, high = (share * seconds / (seconds + d) for d in (0.005, -0.005))
        assert low - 0.05 <= float(row["published"][name]) <= high + 0.05


# ---- pipelines -----------------------------------------------------------------------------------

RATES = {"f1b": "1f1b", "f1bi": "interleaved", "h1": "zb-h1", "h2": "zb-h2", "zb1p": "zb-h1"}


@pytest.mark.parametrize("row", rows("05_zero_bubble.json", "table5_with_table9"))
def test_zero_bubble_table_5(row):
    times = [float(row[key]) for key in ("TF", "TB", "TW", "Tcomm")]
    for name, schedule in RATES.items():
        chunks = row["v_interleave"] if name == "f1bi" else 1
        rate = estimate.bubble(schedule, row["p"], row["m"], *times, chunks)
        assert printed(rate, row["published_bubble_rate"][name]), (name, rate)


def test_gpipe():
    """1811.06965, section 2.3: (K - 1) / (M + K - 1), and the speedups that this leaves."""
    for k, m in product((1, 2, 4, 8), (1, 4, 32)):
        assert estimate.bubble("gpipe", k, m) == pytest.approx((k - 1) / (m + k - 1), abs=1e-15)
    notes = {(2, 1): 1, (2, 4): 1.6, (2, 32): 1.94, (4, 4): 2.29, (4, 32): 3.66, (8, 32): 6.56}
    for (k, m), speedup in notes.items():
        assert printed(k * (1 - estimate.bubble("gpipe", k, m)), Decimal(str(speedup)))


@pytest.mark.parametrize("row", rows("10_ultrascale_playbook.json", "deterministic", "bubble_p8"))
def test_the_playbooks_bubbles(row):
    """As a share of the ideal time."""
    bubble = estimate.bubble("1f1b", row["p"], row["m"], chunks=row["v"])
    assert bubble / (1 - bubble) == pytest.approx(float(row["published"]), abs=1e-12)


SIZES = [(1, 3), (2, 1), (2, 4), (3, 9), (4, 4), (4, 6), (4, 8), (5, 3), (8, 16)]


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("hop", [0, 0.5])
def test_bubbles_are_those_of_the_simulated_schedules(p, m, hop):
    """But for interleaving's hops, of which the paper's own order has p fewer."""
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        order = getattr(schedules, estimate.descriptions.SCHEDULES[name])(p, m)
        for forward, backward, weights in ((2, 2, 1), (3, 2, 3), (1, 2, 4)):
            run = schedules.simulate(order, forward, backward + weights, weights, hop)
            got = estimate.bubble(name, p, m, forward, backward, weights, hop)
            assert got == pytest.approx(run.idle_share, abs=1e-12), (name, forward)


# ---- collectives ---------------------------------------------------------------------------------


def test_nccl_bus_factors():
    """nccl-tests, doc/PERFORMANCE.md."""
    factors = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
    for (op, passes), n in product(factors.items(), (1, 2, 8, 96)):
        seconds = estimate.collective_time(op, n, 10**9, 1e9)
        assert seconds == pytest.approx(passes * (n - 1) / n)
        waited = estimate.collective_time(op, n, 0, 1e9, 1e-6)
        assert waited == pytest.approx(passes * (n - 1) * 1e-6)
    first, second, *_ = table("07_nccl.json")["worked"]
    for row, unit, scale in ((first, "time_ms", 1e3), (second, "time_s", 1)):
        seconds = estimate.collective_time(row["op"], row["n"], int(row["S"]), float(row["B"]))
        assert printed(seconds * scale, row[unit])


@pytest.mark.parametrize("row", rows("07_nccl.json", "measured_allreduce_32ranks", "rows"))
def test_nccl_times_follow_from_their_busbw(row):
    """Both are printed, as averages of their own over many runs: near each other, not equal."""
    seconds = estimate.collective_time(
        "all_reduce", 32, row["bytes"], float(row["busbw_GBps"]) * 1e9
    )
    rounding = 0.005 / float(row["busbw_GBps"])
    assert seconds * 1e6 == pytest.approx(float(row["time_us"]), rel=0.005 + rounding)


# ---- model states ---------------------------------------------------------------------------------


def test_the_playbooks_bytes_a_parameter():
    """Its table has 16 and 20 GB for 1e9 parameters, without and with gradients of float32."""
    for size, (plain, more) in table("10_ultrascale_playbook.json")["deterministic"][
        "table_16_20B"
    ].items():
        count = int(size[:-1]) * 10**9
        assert printed(estimate.model_states(count, 1, 0) / 1e9, plain)
        assert printed(estimate.model_states(count, 1, 0, gradient_bytes=6) / 1e9, more)


# ---- counts --------------------------------------------------------------------------------------


def test_llamas_parameters():
    for size, model in LLAMA.items():
        assert (
            estimate.parameters(model) == table("04_llama3.json")["models"][size]["params_computed"]
        )


def test_mixtrals_parameters():
    shape = {"kv_heads": 8, "ffn": 14336, "gated": True, "tied": False, "bias": False}
    mixtral = Model(32, 4096, 32, 32000, **shape, experts=8, top_k=2)
    assert estimate.parameters(mixtral) == 46_702_792_704  # the published checkpoint's
    visited = estimate.flops(mixtral, 1, 1) - 12 * 32 * 4096
    assert visited == 6 * 12_879_925_248


@pytest.mark.parametrize("row", rows("09_torchtitan.json", "rows"))
def test_torchtitans_flops(row):
    wanted = row["flops_per_token_excl_embed"]
    assert estimate.flops(LLAMA[row["model"]], row["seq"], 1, "torchtitan") == wanted


def test_llama3s_step():
    """Its tokens, FLOP/s and seconds, with the whole attention and with half of it."""
    (row,) = table("04_llama3.json")["table4"]
    layout = Layout(dp=row["dp"], tp=row["tp"], pp=row["pp"], cp=row["cp"])
    assert layout.gpus == row["gpus"]
    for convention, name in (("6n+attention", "full"), ("causal", "causal")):
        flops = estimate.flops(LLAMA["405B"], row["seq"], row["computed"]["tokens"], convention)
        seconds = flops / (row["gpus"] * row["published"]["tflops_per_gpu"] * 1e12)
        assert printed(seconds, row["computed"][f"step_s_{name}_attn"])


def test_parameters_are_those_of_a_module():
    layers, width, vocab, positions = 3, 48, 101, 17
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    real = nn.ModuleList(
        [
            nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width)),
            nn.Embedding(vocab, width),
            nn.Embedding(positions, width),
        ]
    )
    model = Model(layers, width, 4, vocab, positions=positions)
    assert estimate.parameters(model) == sum(p.numel() for p in real.parameters())


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_stages_together_hold_the_model(tp, pp):
    """2 bytes each; norms and the biases of rows are on every tensor rank."""
    for model in (Model(6, 64, 8, 256, tied=False), llama(6, 64, 8, 128, 256)):
        layout = Layout(tp=tp, pp=pp)
        held = sum(
            estimate.memory(model, layout, 32, stage)["parameters"] // 2 for stage in range(pp)
        )
        copied = 6 * (2 * 64 * (2 if model.bias else 1) + (2 * 64 if model.bias else 0))
        copied += 64 * (2 if model.bias else 1)
        assert tp * held == estimate.parameters(model) + (tp - 1) * copied


def test_more_stages_hold_as_many_activations():
    """2205.05198, section 4.2.3: 1F1B's first stage keeps as much, whatever p is."""
    model = Model(8, 64, 8, 256)
    held = {
        pp: estimate.memory(model, Layout(pp=pp, micro_batches=8), 32)["activations"]
        for pp in (1, 2, 4, 8)
    }
    assert len(set(held.values())) == 1
    last = estimate.memory(model, Layout(pp=4, micro_batches=8), 32, stage=3)
    assert last["activations"] * 4 == held[1]


def test_experts_are_shared_out():
    model = Model(4, 64, 4, 256, gated=True, bias=False, experts=8, top_k=2)
    one, four = (estimate.memory(model, Layout(dp=8, ep=ep), 32) for ep in (1, 4))
    experts = 2 * 4 * 8 * 3 * 64 * 256
    assert one["parameters"] - four["parameters"] == experts * 3 // 4
    (out, back) = [c for c in estimate.traffic(model, Layout(dp=8, ep=4), 32) if c.group == "ep"]
    assert out.calls == 2 * 4 and out.payload == back.payload == 2 * 32 * 64 * 2


def test_deepseeks_parameters():
    """671 billion, of which a token visits 37 (2412.19437), but for latent attention's matrices."""
    shape = {"gated": True, "tied": False, "bias": False, "ffn": 2048, "head_dim": 128}
    model = Model(61, 7168, 128, 129_280, **shape, experts=256, top_k=8, shared=1, dense=3)
    attention = 61 * (4 * 7168 * 128 * 128 - 187_107_328)  # of the published shape
    assert estimate.parameters(model) - attention == pytest.approx(671e9, rel=0.002)
    assert estimate.counting.active_parameters(model) - attention == pytest.approx(37.5e9, rel=0.02)


def test_qwens_parameters():
    """Qwen3-30B-A3B's heads are twice as long as its width shared out: 30.5 billion parameters."""
    shape = {
        "gated": True,
        "tied": False,
        "bias": False,
        "ffn": 768,
        "head_dim": 128,
        "kv_heads": 4,
    }
    model = Model(48, 2048, 32, 151_936, **shape, experts=128, top_k=8)
    assert estimate.parameters(model) == pytest.approx(30.53e9, rel=0.001)


def test_uneven_stages():
    """Llama 3: 126 layers on 16 stages; the ends hold one less."""
    assert Layout(pp=16).stage_layers(126) == [7] + [8] * 14 + [7]
    assert Layout(pp=4).stage_layers(7) == [2, 2, 2, 1]
    assert Layout(pp=3).stage_layers(9) == [3, 3, 3]


# ---- nonsense ------------------------------------------------------------------------------------


def test_a_token_is_kept_by_each_expert_that_it_visits():
    model = Model(1, 64, 4, 256, gated=True, ffn=96, experts=8, top_k=2)
    for tp, sequence_parallel in ((1, True), (2, True), (2, False)):
        layout = Layout(tp=tp, sequence_parallel=sequence_parallel)
        two, three = (
            estimate.memory(replace(model, top_k=k), layout, 32)["activations"] for k in (2, 3)
        )
        shared = tp if sequence_parallel else 1
        assert three - two == 32 * (2 * 64 // shared + 8 * 96 // tp)


def test_one_expert_of_the_papers_shape_keeps_what_its_mlp_keeps():
    model = Model(2, 64, 4, 256)
    one = replace(model, experts=1, top_k=1)
    for layout in (Layout(), Layout(tp=2), Layout(tp=2, sequence_parallel=False)):
        held = [estimate.memory(m, layout, 32)["activations"] for m in (model, one)]
        assert held[0] == held[1]


def test_a_pipelines_gradients_wait_for_the_last_micro_batch_and_the_root_is_whole():
    """FSDP2 reduces in every micro-batch (pytorch#126166), a stage of a pipeline in the last one."""
    model = Model(4, 64, 8, 4096, tied=False)
    layer, whole = estimate.counting.layer_parameters(model), estimate.parameters(model)
    root = whole - 4 * layer
    few = replace(model, vocab=8)  # whose loss takes less than a layer's backward pass
    full = [Layout(dp=4, zero=zero, recompute="full") for zero in (0, 2)]
    held = [estimate.memory(few, layout, 32)["temporary"] for layout in full]
    assert held[1] - held[0] == 6 * layer + 2 * (estimate.parameters(few) - 4 * layer)
    for zero, gathered in ((2, 0), (3, root + 2 * layer)):
        alone, one, two = (
            estimate.memory(model, layout, 32)["temporary"]
            for layout in (
                Layout(dp=4),
                Layout(dp=4, zero=zero),
                Layout(dp=4, zero=zero, micro_batches=2),
            )
        )
        assert one - alone == two - alone == 2 * gathered + 2 * root  # the loss's moment
    stage = Layout(dp=4, pp=2, zero=3, reshard=False, micro_batches=4)
    own = estimate.memory(model, replace(stage, zero=0), 32, 1)["gradients"] // 4
    kept = [estimate.memory(model, replace(stage, zero=z), 32, 1)["temporary"] for z in (0, 3)]
    assert kept[1] - kept[0] == (4 + 2) * own


def test_what_a_parameter_takes():
    """Megatron-LM's distributed optimizer: 6 + 12 / d bytes, with float32 gradients; FSDP2 in mixed
    precision: 16 / d, of which the shards are the float32 copy."""
    model, states = Model(4, 64, 8, 256), ("parameters", "gradients", "optimizer")
    count = estimate.parameters(model)
    for zero, wanted in ((0, (2, 4, 12)), (1, (2, 4, 3)), (2, (2, 1, 3)), (3, (1, 1, 2))):
        held = estimate.memory(model, Layout(dp=4, zero=zero), 32)
        assert tuple(held[kind] / count for kind in states) == wanted


def test_recomputed_layers_share_out_their_inputs_with_sequence_parallelism():
    """2205.05198, section 5: 2 s b h, of which sequence parallelism leaves 1 / t on a rank."""
    for shared, wanted in ((True, 2 * 2**30 // 8), (False, 2 * 2**30)):
        assert estimate.activations_per_layer(8192, 16, 8192, 64, 8, shared, "full") == wanted


def test_what_torchtitan_calls_selective_keeps_half_of_what_matrices_give():
    """Of a Llama's layer: its input and attention's output, and every second matrix product."""
    model = llama(32, 4096, 32, 14336)
    outputs = 2 * 4096 + 2 * 1024 + 2 * 14336 + 4096
    held = estimate.memory(model, Layout(recompute="half"), 8192)["activations"]
    assert held == 32 * 8192 * (2 * 2 * 4096 + outputs)


# DeepSeek-V3 computed more again than `recompute` can say, Llama 3 freed tensors early.
@pytest.mark.parametrize("source", sorted(papers.SOURCES.keys() - {"DeepSeek-V3", "Llama 3"}))
def test_runs_that_ended_are_not_refused(source):
    for row in (run.row for run in papers.runs(source)):
        held = fullest(row.model, row.layout, row.seq)
        assert fits(held, row.hardware or papers.SOURCES[source]), row.name


@pytest.mark.parametrize(
    ("source", "share"), [("zero bubble", 1), ("torchtitan", 0.8), ("nanotron", 0.8)]
)
def test_memory_is_near_what_was_measured(source, share):
    runs = [run for run in bench_plans.runs_of(source) if run.memory]
    held = [fullest(run.row.model, run.row.layout, run.row.seq)["total"] for run in runs]
    near = sum(abs(said / run.memory - 1) <= 0.15 for said, run in zip(held, runs))
    assert near >= share * len(runs)


def test_the_last_stage_has_fewer_layers_where_its_output_layer_takes_longer():
    """nanotron's 1B, a vocabulary of 131,072: the output layer is as much as four layers."""
    small = Model(16, 2048, 32, 131_072, gated=True, ffn=8192, bias=False)
    counts = [stage.layers for stage in stages_of(small, Layout(pp=8), 4096)]
    assert sum(counts) == 16 and counts[0] == 3 and counts[-1] == 0
    wide = Model(96, 12_288, 96, 51_200)
    assert {stage.layers for stage in stages_of(wide, Layout(pp=16), 2048)} == {6}


def test_tokens_of_experts_cross_the_tensor_group_once_for_each_expert():
    model = Model(2, 64, 4, 256, experts=8, top_k=3)
    calls = estimate.traffic(model, Layout(tp=4, dp=8, ep=8), 32, stage=0)
    size, layers = 2 * 32 * 64, 2
    for when in ("forward", "backward"):
        payloads = {c.payload: c.calls for c in calls if (c.group, c.when) == ("tp", when)}
        assert payloads[3 * size] == layers
        ways = [c for c in calls if (c.group, c.when) == ("ep", when)]
        assert [(c.calls, c.payload) for c in ways] == [(2 * layers, 3 * size // 4)]


GPU = {
    "peak": 312e12,
    "hbm_bytes": 80 * 10**9,
    "hbm_bandwidth": 2e12,
    "node": 8,
    "intra_bandwidth": 240e9,
    "intra_latency": 5e-6,
    "inter_bandwidth": 25e9,
    "inter_latency": 1e-5,
}
SMALL = Model(4, 64, 8, 256)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Model(4, 64, 8, 256, kv_heads=3), "8 heads cannot share 3 KV heads"),
        (lambda: Model(4, 60, 8, 256), "width of 60 cannot be shared out among 8 heads"),
        (lambda: Model(4, 64, 8, 256, experts=4), "give both, or neither"),
        (lambda: Model(0, 64, 8, 256), "layers is a whole number of at least 1"),
        (lambda: Layout(tp=2.0), "tp is a whole number"),
        (lambda: Layout(zero=4), "zero is one of 0, 1, 2, 3, not 4"),
        (lambda: Layout(schedule="1F1B"), "schedule is one of gpipe, 1f1b"),
        (lambda: Layout(dp=4, ep=3), "cannot form expert groups of 3"),
        (lambda: Layout(chunks=2), "need the interleaved schedule"),
        (
            lambda: Layout(pp=4, chunks=2, schedule="interleaved", micro_batches=6),
            "a multiple of 4 micro-batches",
        ),
        (lambda: Layout(schedule="interleaved"), "at least 2 chunks"),
        (lambda: Layout(order=("tp", "dp")), "order names each of tp, cp, dp, pp once"),
        (lambda: Layout(tp=3).check(SMALL, 32), "8 heads cannot be split among 3"),
        (lambda: estimate.memory(SMALL, Layout(pp=5), 32), "4 layers cannot fill 5 stages"),
        (lambda: estimate.memory(SMALL, Layout(pp=2), 32, stage=2), "stage is one of 0, 1"),
        (
            lambda: estimate.traffic(SMALL, Layout(cp=3), 32),
            "sequence of 32 cannot be split into 3",
        ),
        (
            lambda: estimate.memory(replace(SMALL, positions=16), Layout(), 32),
            "positions for 16 tokens; the sequence has 32",
        ),
        (lambda: Hardware(**GPU | {"peak": 312}), "peak is in FLOP/s, and 312 is too little"),
        (lambda: Hardware(**GPU | {"hbm_bytes": 80}), "hbm_bytes is in B, and 80 is too little"),
        (
            lambda: Hardware(**GPU | {"intra_latency": 5}),
            "is in seconds, and 5 is none of a network",
        ),
        (lambda: estimate.collective_time("all_reduce", 8, 10**9, 450), "bandwidth is in B/s"),
        (lambda: estimate.collective_time("broadcast", 8, 1, 1e9), "op is one of all_reduce"),
        (lambda: estimate.collective_time("all_reduce", 0, 1, 1e9), "ranks is a whole number"),
        (lambda: estimate.collective_time("all_reduce", 8, -1, 1e9), "payload is in bytes"),
        (lambda: estimate.model_states(7.5, 64, 1), "counted, not in billions"),
        (lambda: estimate.flops(SMALL, 32, 32, "6n"), "convention is one of 6n\\+attention"),
        (lambda: estimate.bubble("1f1b", 4, 8, chunks=2), "need the interleaved schedule"),
        (lambda: estimate.bubble("interleaved", 4, 6, chunks=2), "a multiple of 4 micro-batches"),
        (lambda: estimate.bubble("interleaved", 4, 8), "at least 2 chunks"),
        (lambda: estimate.bubble("1f1b", 4, 8, hop=-1), "Times cannot be negative"),
        (
            lambda: estimate.activations_per_layer(1, 1, 1, 1, recompute="all"),
            "recompute is one of",
        ),
    ],
)
def test_nonsense_is_refused_with_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_sensible_hardware_is_accepted():
    assert Hardware(**GPU).node == 8
