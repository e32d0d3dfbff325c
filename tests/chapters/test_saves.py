"""Chapter 8's weights as safetensors, and its save that training does not wait for."""

import json
import struct

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from course_exercises.authoring import load_code
from course_utils.hardware import device
from course_utils.launch import launch

write_safetensors, read_safetensors, whole, save_beside_training, loaded_from = (
    load_code(8, name)
    for name in (
        "write_safetensors",
        "read_safetensors",
        "whole",
        "save_beside_training",
        "loaded_from",
    )
)


def written(rank, path) -> dict[str, Tensor]:
    """The values of a model whose rows do not divide; there may be more ranks than rows."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 2)).to(device()))
    write_safetensors(model, path)
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_ranks_write_one_file_as_the_format_has_it(ranks, tmp_path):
    """huggingface.co/docs/safetensors, format: no gaps, no bytes behind the last tensor."""
    path = tmp_path / "model.safetensors"
    expected = launch(written, ranks, path)[0]
    raw = path.read_bytes()
    [length] = struct.unpack("<Q", raw[:8])
    entries, end = json.loads(raw[8 : 8 + length]), 0
    assert list(entries) == list(expected)
    for name, entry in entries.items():
        begin, end = end, entry["data_offsets"][1]
        assert entry == {
            "dtype": "F32",
            "shape": [*expected[name].shape],
            "data_offsets": [begin, end],
        }
        values = raw[8 + length :][begin:end]
        assert values == expected[name].numpy().tobytes()
    assert len(raw) == 8 + length + end


def test_a_file_of_another_program_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    entries = {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "F32", "shape": [2, 1], "data_offsets": [4, 12]},
        "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack(f"<Q{len(header)}s3f", len(header), header, 1, 2, 3))
    tensors = read_safetensors(path)
    assert {name: values.tolist() for name, values in tensors.items()} == {"a": 1, "b": [[2], [3]]}


def test_what_training_does_after_the_call_is_not_saved(tmp_path):
    """The saved run's model at the call is that of two steps, whoever loads it."""
    save = load_code(8, "train_and_save")
    after_two, after_four = launch(save, 2, tmp_path)[0]
    launch(save_beside_training, 2, tmp_path)
    for loaded in launch(loaded_from, 3, tmp_path / "beside"):
        assert torch.equal(loaded, after_two)
        assert not torch.equal(loaded, after_four)
