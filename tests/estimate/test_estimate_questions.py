"""Ten questions that people asked in public before, or after, they ran out of memory or time."""

import re

import pytest

import course_planner as estimate
from course_planner import Layout, Model, catalogue
from course_planner.memory import fullest
from course_planner.networks import Place, place_of
from course_utils.__main__ import main

A100 = catalogue.hardware_called("A100")
QWEN2 = "layers=28,width=3584,heads=28,kv_heads=4,ffn=18944,vocab=152064,gated=true,tied=false"
TRL = "layers=80,width=9216,heads=72,vocab=128000,ffn=36864"
V100 = "A100,peak=125e12,hbm_bytes=34e9,hbm_bandwidth=0.9e12,intra_bandwidth=150e9"


@pytest.mark.parametrize(
    ("model", "gpus", "hardware", "runs"),
    [
        ("Llama-2-7B", 1, "A100", False),  # 1: github.com/meta-llama/llama/issues/342
        ("Llama-2-7B", 2, "A100", True),
        ("Llama-2-13B", 2, "A800", False),  # 2: Alpha-VLLM/LLaMA2-Accessory, issue 26
        ("Llama-2-13B", 4, "A800", True),
        (TRL, 8, "A100", False),  # 4: huggingface/trl, issue 2294
    ],
)
def test_how_many_gpus_train_a_model(model, gpus, hardware, runs, capsys):
    question = ["plan", "--model", model, "--gpus", str(gpus), "--hardware", hardware]
    question += ["--seq", "1024", "--batch", str(gpus)]
    if runs:
        main(question)
        assert "most of it" in capsys.readouterr().out
    else:
        with pytest.raises(SystemExit, match="No layout fits."):
            main(question)


@pytest.mark.parametrize(
    ("model", "seq", "hardware", "layout", "runs"),
    [
        ("Llama-2-7B", 1024, V100, "dp=8,zero=2", False),  # 3: hiyouga/LlamaFactory, issue 1221
        ("Llama-2-7B", 1024, V100, "dp=8,zero=3", True),
        (QWEN2, 10240, "H100", "tp=2", False),  # 5: ISEEKYAN/verl_megatron_practice, issue 2
    ],
)
def test_whether_a_layout_runs(model, seq, hardware, layout, runs, capsys):
    question = ["plan", "--model", model, "--seq", str(seq), "--hardware", hardware]
    main([*question, "--layout", layout])
    assert ("which fits in" in capsys.readouterr().out) == runs


def test_what_the_loss_of_a_large_vocabulary_holds():
    """6: huggingface/trl, issue 6858: 16,384 tokens by 248,320 words, 47.6 GB measured."""
    held = estimate.memory(Model(1, 64, 8, 248_320), Layout(), 16_384)
    assert held["temporary"] + held["loss"] == pytest.approx(47.6e9, rel=0.05)


@pytest.mark.parametrize("micro_batches", [2, 8])
def test_what_accumulation_costs_with_fsdp(micro_batches):
    """7: pytorch/pytorch, issue 126166: nothing, since FSDP2 reduces in every micro-batch."""
    model = catalogue.model_called("70B")
    one, more = (
        estimate.memory(model, Layout(dp=64, zero=3, micro_batches=m), 2048)["total"]
        for m in (1, micro_batches)
    )
    assert one == more


def test_what_a_long_sequence_takes_with_full_recomputation():
    """8: torchtitan's benchmarks, table 2: 8B, 32,768 tokens on each of 8 GPUs: 83.9 GiB."""
    layout = Layout(dp=8, zero=3, recompute="full")
    held = fullest(catalogue.model_called("8B"), layout, 32_768)
    assert held["total"] / 2**30 == pytest.approx(83.9, rel=0.15)


def test_how_fsdp_scales():
    """9: FSDP's paper (2304.11277, section 5.4): 175 billion parameters, 128 to 512 GPUs, as quick."""
    model = Model(96, 12_288, 96, 50_257)
    times = [
        estimate.step_time(model, Layout(dp=dp, zero=3, recompute="full"), 2048, A100)
        for dp in (128, 512)
    ]
    assert times[1].seconds == pytest.approx(times[0].seconds, rel=0.05)


def test_offloading_is_not_estimated(capsys):
    """10: deepspeedai/DeepSpeed, issue 4527: 0.5 GB by its estimate, 20 GB in use. Ours has none."""
    with pytest.raises(SystemExit, match="--layout has no 'offload'"):
        main(["plan", "--model", "7B", "--seq", "2048", "--layout", "dp=4,zero=3,offload=true"])
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert re.search(r"Not tried: .*offloading", capsys.readouterr().out, re.DOTALL)


def test_a_model_larger_than_a_gpu_trains_with_fsdp_alone(capsys):
    """simplescaling/s1#25: a GPU gathers a block at a time, and holds no copy of the whole model. What
    does not fit with 65,536 tokens is activations, and with 32,768 a loss that is not fused."""
    question = (
        "plan --model Qwen3-32B --gpus 16 --batch 16 --hardware A100 --only dp=16,zero=3 --seq"
    )
    main([*question.split(), "4096"])
    shown = capsys.readouterr().out
    assert "dp 16 x cp 1 x pp 1 x tp 1" in shown and "fused loss" not in shown
    main([*question.split(), "32768"])
    assert "only with a fused loss do these fit: 1\n" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="30.5 GiB are parameters, gradients and optimizer, the"):
        main([*question.split(), "65536"])


def test_a_model_that_fits_once_it_is_sharded_may_be_too_large_before(capsys):
    """7 billion parameters are 25 GiB before fully_shard, and a 4090 has 23.6."""
    question = ["plan", "--model", "Llama-2-7B", "--seq", "512", "--hardware"]
    for hardware, layout, told in (
        ("4090", "dp=16,zero=3", True),
        ("4090", "dp=2,tp=8", False),
        ("L40S", "dp=16,zero=3", False),
    ):
        main([*question, hardware, "--layout", layout])
        said = capsys.readouterr().out
        assert "which fits in" in said
        assert ("needs 25.1 GiB: make it on the meta device" in said) == told


def test_a_list_of_plans_says_so_too(capsys):
    """llama-cookbook#100: FSDP's layout fits, and making the model for it did not."""
    question = "plan --model Llama-2-7B --seq 512 --batch 8 --gpus 8 --hardware 4090 --only zero=3"
    main(question.split())
    assert capsys.readouterr().out.count("needs 25.1 GiB: make it on the meta device") == 1


def test_groups_that_shard_within_a_node():
    """HSDP (2304.11277, section 3.2.2): each node holds the model, gathers within, and sums up shards
    among nodes."""
    model = catalogue.model_called("8B")
    whole, within = Layout(dp=64, zero=3), Layout(dp=64, zero=3, replicas=8)
    states = ("parameters", "gradients", "optimizer")
    for kind in states:
        held = [estimate.memory(model, layout, 2048)[kind] for layout in (whole, within)]
        assert held[1] == pytest.approx(8 * held[0])
    calls = estimate.traffic(model, within, 2048)
    (between,) = [call for call in calls if call.group == "replicas"]
    assert (between.op, between.payload) == ("all_reduce", 2 * estimate.parameters(model) // 8)
    gathered = [call for call in calls if call.op == "all_gather"]
    assert sum(c.sent for c in gathered) < sum(
        c.sent for c in estimate.traffic(model, whole, 2048) if c.op == "all_gather"
    )
    assert place_of("dp", within, 8) == Place(8, 8)
    assert place_of("replicas", within, 8) == Place(8, 1)
    for wrong in ({"replicas": 3}, {"replicas": 8, "zero": 1}):
        with pytest.raises(ValueError, match="replicas share out 64 ranks"):
            Layout(**{"dp": 64, "zero": 3} | wrong)


def test_gradients_of_two_bytes():
    model = Model(4, 64, 8, 256)
    four, two = (
        estimate.memory(model, Layout(dp=4, zero=2, gradient_bytes=size), 32) for size in (4, 2)
    )
    assert four["gradients"] == 2 * two["gradients"]
    with pytest.raises(ValueError, match="gradient_bytes is one of 2, 4"):
        Layout(gradient_bytes=3)


def test_latent_attention():
    """DeepSeek-V3 (2412.19437, section 4.2): 671 billion parameters, of which a token visits 37; the
    router's 58 x 256 biases are left out."""
    model = catalogue.model_called("DeepSeek-V3")
    assert estimate.parameters(model) == 671_026_419_200 - 58 * 256
    assert estimate.counting.active_parameters(model) == pytest.approx(37e9, rel=0.02)
    plain = Model(1, 64, 4, 256, head_dim=32)
    latent = Model(1, 64, 4, 256, head_dim=32, kv_rank=16, rotary=8)
    seq, matrices = (
        4096,
        {model: estimate.counting.matrices_visited(model) for model in (plain, latent)},
    )
    core = [estimate.flops(m, seq, seq, "korthikanti") - 6 * seq * matrices[m] for m in matrices]
    head = 6 * seq * 256 * 64
    assert (core[1] - head) * 64 == (
        core[0] - head
    ) * 72  # 32 + 8 for queries by keys, 32 for values
    sent = [sum(c.sent for c in estimate.traffic(m, Layout(cp=2), seq)) for m in matrices]
    assert sent[1] - sent[0] < 0  # the numbers that keys and values come of
    with pytest.raises(ValueError, match="give kv_rank too"):
        Model(1, 64, 4, 256, rotary=8)
