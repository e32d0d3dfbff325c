"""Models and GPUs by their names, and models from a config.json of Hugging Face."""

import json

import pytest

import course_planner as estimate
from course_planner import catalogue, options

MODELS, GPUS = catalogue.models(), catalogue.gpus()


def test_a_model_has_the_parameters_that_its_source_counts():
    """Norms of queries and keys (Qwen3), biases and sinks of GPT-OSS's attention, and MPT's positions, a
    vector a token, are left out."""
    for name, row in MODELS.items():
        got, counted = estimate.parameters(catalogue.model_called(name)), row["published"]
        exact = name.startswith(("Llama", "Mixtral"))
        missing = 2048 * row["config"]["d_model"] if name.startswith("MPT") else 0
        assert got + missing == pytest.approx(counted, rel=0 if exact else 1e-3), name


def test_every_entry_has_a_source_and_no_name_means_two():
    for rows in (MODELS, GPUS):
        assert all(row["source"] for row in rows.values())
        names = [each for name, row in rows.items() for each in (name, *row["also"])]
        meant = [catalogue._meant(name, rows) for name in names]
        assert meant == [of for of, row in rows.items() for _ in (of, *row["also"])]


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("70b", "Llama-3-70B"),
        ("llama3-70b", "Llama-3-70B"),
        ("meta-llama/Llama-3.1-70B-Instruct", "Llama-3-70B"),
        ("Meta-Llama-3-8B", "Llama-3-8B"),
        ("meta-llama/Llama-2-7b-hf", "Llama-2-7B"),
        ("mistralai/Mixtral-8x7B-v0.1", "Mixtral-8x7B"),
        ("qwen3_8b", "Qwen3-8B"),
    ],
)
def test_a_model_is_known_by_what_people_type(typed, name):
    assert catalogue.model_called(typed) == catalogue.model_called(name)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("h100", "H100"),
        ("NVIDIA H100 SXM", "H100"),
        ("a100-40gb", "A100-40"),
        ("A100-80GB", "A100"),
        ("RTX 4090", "4090"),
        ("gb200", "GB200"),
    ],
)
def test_a_gpu_is_known_by_what_people_type(typed, name):
    assert catalogue.hardware_called(typed) == catalogue.hardware_called(name)


def test_memory_is_what_cuda_reports():
    """A little less than the name says, if its GB are GiB."""
    for name, size in {"A100": 80, "A100-40": 40, "H100": 80, "L40S": 45, "4090": 24}.items():
        assert 0.98 * size < catalogue.hardware_called(name).hbm_bytes / 2**30 < size
    assert catalogue.hardware_called("GB200").node == 72


def test_another_gpu_is_said_by_what_differs():
    hardware = options.hardware_of("h100,hbm_bytes=96e9,node=4")
    assert (hardware.hbm_bytes, hardware.node, hardware.peak) == (96 * 10**9, 4, 989e12)


CONFIGS = {
    "llama": (
        {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100},
        estimate.Model(2, 64, 4, 100, 2, ffn=96, gated=True, tied=False, bias=False),
    ),
    "head size and tied": (
        {"model_type": "gemma", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
        | {"head_dim": 16, "intermediate_size": 96, "vocab_size": 100, "torch_dtype": "bfloat16"},
        estimate.Model(2, 64, 4, 100, ffn=96, gated=True, tied=True, bias=False),
    ),
    "gpt2": (
        {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 32}
        | {"vocab_size": 100, "n_inner": None},
        estimate.Model(2, 64, 4, 100, positions=32),
    ),
    "mixture": (
        {"model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 64}
        | {"num_attention_heads": 4, "intermediate_size": 999, "moe_intermediate_size": 32}
        | {"num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 100},
        estimate.Model(
            2, 64, 4, 100, ffn=32, gated=True, tied=False, bias=False, experts=8, top_k=2
        ),
    ),
    "latent attention": (
        {"model_type": "deepseek_v2", "num_hidden_layers": 2, "hidden_size": 64}
        | {"num_attention_heads": 4, "vocab_size": 100, "head_dim": 8, "kv_lora_rank": 16}
        | {"q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 32, "v_head_dim": 32},
        estimate.Model(
            2, 64, 4, 100, gated=True, tied=False, bias=False, head_dim=32, kv_rank=16, rotary=8
        ),
    ),
    "that also sees": (
        {"model_type": "mllama"}
        | {"text_config": {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64}
        | {"num_attention_heads": 4, "vocab_size": 100, "tie_word_embeddings": True}},
        estimate.Model(2, 64, 4, 100, gated=True, tied=True, bias=False),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_of_hugging_face_is_a_model(kind, tmp_path):
    config, model = CONFIGS[kind]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert options.model_of(str(file)) == options.model_of(str(tmp_path)) == model
    assert options.model_of(f"{file},vocab=200").vocab == 200


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "config.json cannot be read as JSON"),
        ("[]", "config.json holds no model: a config.json is an object."),
        ("{}", "has no num_hidden_layers or n_layer or n_layers, no hidden_size or"),
        (
            json.dumps(CONFIGS["llama"][0] | {"kv_lora_rank": 512}),
            "has kv_lora_rank, and qk_nope_head_dim differs from v_head_dim, for which",
        ),
        (json.dumps(CONFIGS["llama"][0] | {"num_key_value_heads": 3}), "4 heads cannot share 3"),
    ],
)
def test_a_config_that_is_no_model_gets_a_sentence(text, sentence, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="(?s).*") as raised:
        options.model_of(str(file))
    assert sentence in str(raised.value)


def test_a_config_that_is_not_there_gets_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="There is no file .*config.json"):
        options.model_of(str(tmp_path / "config.json"))
    with pytest.raises(ValueError, match="There is no file .*config.json"):
        options.model_of(str(tmp_path))
