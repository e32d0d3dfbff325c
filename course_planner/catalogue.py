"""Models and GPUs by the names that people type, and models from a config.json of Hugging Face.

`data/catalogue` holds both, each with its source.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from course_planner.descriptions import Hardware, Model, require

# The project is installed in place (pip install -e .), so its data lies beside the package.
FOLDER = Path(__file__).resolve().parents[1] / "data" / "catalogue"
# Seconds: hops of NCCL's protocol LL128 (its src/graph/tuning.cc); data sheets print none.
LATENCIES = {"intra_latency": 1.9e-6, "inter_latency": 8.5e-6}

# Matrices in Float8, of bfloat16's peak; casts keep them from twice. torchtitan's 8B has 1.28 times the
# tokens (benchmarks, table 1), where matrices are six tenths of a step.
FLOAT8 = 1.6
_NO_FLOAT8 = ("A100", "A100-40")

# Without these words a name means the same model, or the same GPU.
_ENDINGS = re.compile(r"\b(nvidia|geforce|meta|sxm\d?|instruct|base|chat|hf|it|v0\.1)\b")
# Of families whose config.json says less: what its code does.
_TIED = ("gpt2", "mpt", "gemma", "gemma2", "opt")
_PLAIN_MLP = ("gpt2", "gpt_neox", "mpt", "opt", "bloom", "falcon", "starcoder2", "phi")
_BIASED = ("gpt2", "gpt_neox", "mpt", "opt", "bloom", "starcoder2", "phi")
# Each field of a Model, and its names in a config.json.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
    "kv_heads": ("num_key_value_heads",),
    "ffn": ("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim"),
    "head_dim": ("head_dim",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok", "experts_per_token"),
    "positions": ("n_positions",),
    "shared": ("n_shared_experts", "shared_expert_intermediate_size"),
    "dense": ("first_k_dense_replace",),
    "kv_rank": ("kv_lora_rank",),
    "query_rank": ("q_lora_rank",),
    "rotary": ("qk_rope_head_dim",),
}
_NEEDED = ("layers", "width", "heads", "vocab")


@cache
def models() -> dict[str, dict]:
    """The models by name: their other names, source, published parameters and config."""
    rows = json.loads((FOLDER / "models.json").read_text(encoding="utf-8"))["models"]
    return {row["name"]: row for row in rows}


@cache
def gpus() -> dict[str, dict]:
    """The GPUs by name: their other names, source and numbers."""
    rows = json.loads((FOLDER / "gpus.json").read_text(encoding="utf-8"))
    return {name: row for name, row in rows.items() if name != "about"}


def model_called(name: str) -> Model:
    """The model that `name` means: one of `models`, or a config.json, or its folder.

    Raises ValueError, with a sentence, for a name that is none, and for what no Model describes.
    """
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".json":
        return from_config(_read(path), str(path))
    found = _meant(name, models())
    require(
        found is not None,
        f"--model does not know {name!r}; {_near(name, models())} It also takes a config.json of "
        "Hugging Face (its path), and layers=...,width=...,heads=...,vocab=...",
    )
    return from_config(models()[found]["config"], found)


def hardware_called(name: str) -> Hardware:
    """The nodes of a GPU that `name` means; ValueError, with a sentence, for a name that is none."""
    found = _meant(name, gpus())
    require(
        found is not None,
        f"--hardware does not know {name!r}; {_near(name, gpus())} Describe another one by what "
        "differs from one that is like it: H100,peak=...,hbm_bytes=...,hbm_bandwidth=...",
    )
    row = {key: value for key, value in gpus()[found].items() if key not in ("also", "source")}
    return Hardware(hbm_bytes=round(row.pop("memory_GiB") * 2**30), **row, **LATENCIES)


def has_float8(name: str) -> bool:
    """Whether matrices of a GPU may be in Float8; of one that is described, it is believed."""
    return _meant(name.partition(",")[0], gpus()) not in _NO_FLOAT8


def in_float8(hardware: Hardware) -> Hardware:
    """`hardware` with matrices in Float8; attention stays in bfloat16."""
    return replace(hardware, peak=FLOAT8 * hardware.peak, flash=hardware.flash / FLOAT8)


def from_config(config: Mapping, name: str) -> Model:
    """The Model of a config.json of Hugging Face's transformers.

    Left out are an attention's biases alone (Qwen2, GPT-OSS), norms of queries and keys, and sliding
    windows, whose attention counts whole. Raises ValueError, with a sentence, where numbers are missing
    or a Model cannot say what there is.
    """
    config = config.get("text_config", config)  # of a model that also sees
    given = {
        field: next((config[key] for key in keys if config.get(key) is not None), None)
        for field, keys in _NAMES.items()
    }
    missing = [" or ".join(_NAMES[field]) for field in _NEEDED if not given[field]]
    require(not missing, f"{name} has no {', no '.join(missing)}: it describes no transformer.")
    family = str(config.get("model_type", ""))
    values = {field: value for field, value in given.items() if value}
    if "kv_rank" in values:
        values["head_dim"] = config.get("v_head_dim")
        require(
            values["head_dim"] and values["head_dim"] == config.get("qk_nope_head_dim"),
            f"{name} has kv_lora_rank, and qk_nope_head_dim differs from v_head_dim, for which the "
            "estimates have no formula. python -m course_utils trace runs its program instead.",
        )
    if values.get("head_dim", 0) * values["heads"] == values["width"]:
        del values["head_dim"]  # as it is anyway
    if "expansion_ratio" in config:
        values["ffn"] = config["expansion_ratio"] * values["width"]
    values["gated"] = family not in _PLAIN_MLP
    values["tied"] = config.get("tie_word_embeddings", family in _TIED)
    values["bias"] = family in _BIASED and not config.get("no_bias", False)
    return Model(**values)


def _read(path: Path) -> Mapping:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"There is no file {path}; --model takes the path of a config.json."
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}.") from None
    require(isinstance(config, dict), f"{path} holds no model: a config.json is an object.")
    return config


def _plain(name: str) -> str:
    """A name without its case, owner, endings and signs."""
    return re.sub(r"[^a-z0-9]", "", _ENDINGS.sub("", name.lower().rpartition("/")[2]))


def _meant(name: str, known: Mapping[str, dict]) -> str | None:
    for each, row in known.items():
        if _plain(name) in map(_plain, (each, *row["also"])):
            return each
    return None


def _near(name: str, known: Mapping[str, dict]) -> str:
    """Which names are like it, or else all."""
    names = {_plain(each): of for of, row in known.items() for each in (of, *row["also"])}
    inside = [of for plain, of in names.items() if _plain(name) and _plain(name) in plain]
    near = [names[plain] for plain in get_close_matches(_plain(name), names, n=3)]
    like = list(dict.fromkeys([*inside, *near]))
    if like:
        return f"did you mean {' or '.join(like[:4])}?"
    return f"it knows {', '.join(known)}."
