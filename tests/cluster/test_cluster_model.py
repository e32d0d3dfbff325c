"""The model of cluster/train.py in shards: its first values, what it holds, what it sends."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.elastic_runs import TRAIN
from tests.support.on_gloo import launch

sys.path.insert(0, str(TRAIN.parent))
import group
import sizes
import train
from task import Block, Classifier

# rows of every parameter are a multiple of 2, so that two ranks hold the same
OPTIONS = "--checkpoints runs --samples 24 --batch 12 --micro-batch 2 --width 8 --layers 3"


def seen_by(rank: int, options: str) -> dict:
    """What a rank holds and sends in one step."""
    sys.path.insert(0, str(Path(TRAIN).parent))
    import train
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reduced(TorchDispatchMode):
        sent = 0

        def __torch_dispatch__(self, function, types, arguments=(), more=None):
            if "reduce_scatter_base" in function.__name__:
                world = arguments[1].numel() // arguments[0].numel()  # whole, and its part
                self.sent += arguments[1].nbytes * (world - 1) // world
            return function(*arguments, **(more or {}))

    training = train.Training(train.parse(options.split()), torch.device("cpu"))
    first = {name: value.clone() for name, value in training.parameters().items()}
    parts = {name: p.to_local().clone() for name, p in training.model.named_parameters()}
    with Reduced() as reduced:
        training.train_step()
    momentum = [state["momentum_buffer"] for state in training.optimizer.state.values()]
    held = [*training.model.parameters(), *momentum]
    return {
        "first": first,
        "parts": parts,
        "held": sum(tensor.to_local().nbytes for tensor in held),
        "sent": reduced.sent,
        "pieces": training.pieces(12),
        "cost": training.cost(),
    }


@pytest.fixture(scope="module")
def seen() -> dict[str, list[dict]]:
    plans = {"one": (1, ""), "two": (2, ""), "every": (2, "--reduce every"), "three": (3, "")}
    plans["copies"] = (4, "--shard-within 2")
    return {
        name: launch(seen_by, world, f"{OPTIONS} {more}", timeout=300)
        for name, (world, more) in plans.items()
    }


def model() -> nn.Module:
    with torch.device("meta"):
        return Classifier(train.parse(OPTIONS.split()))


@pytest.mark.parametrize("name", ["two", "three", "copies"])
def test_first_values_are_those_of_one_process_to_the_bit(seen, name):
    expected, found = seen["one"][0]["first"], seen[name][0]["first"]
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    blocks = [found[f"blocks.{number}.up.weight"] for number in range(3)]
    assert not torch.equal(blocks[0], blocks[1])  # each module draws its own


def test_shards_differ_between_the_ranks_of_a_set_and_agree_between_copies(seen):
    parts = [rank["parts"]["blocks.0.up.weight"] for rank in seen["copies"]]
    assert not torch.equal(parts[0], parts[1])
    assert torch.equal(parts[0], parts[2]) and torch.equal(parts[1], parts[3])


@pytest.mark.parametrize(("name", "ranks"), [("one", 1), ("two", 2), ("three", 3), ("copies", 2)])
def test_a_rank_holds_what_the_arithmetic_says(seen, name, ranks):
    assert seen[name][0]["held"] == sizes.held_between_steps(model(), ranks)


@pytest.mark.parametrize(("name", "when"), [("two", "last"), ("every", "every")])
def test_reducing_sends_what_the_printed_line_says(seen, name, when):
    found = seen[name][0]
    sent, held = sizes.reduction(model(), 2, found["pieces"], when)
    assert found["pieces"] == 3 and found["sent"] == sent
    assert f"sends {sent:,} bytes" in found["cost"] and f"holds {held:,} bytes" in found["cost"]


def test_reducing_every_time_sends_as_many_times_and_holds_nothing(seen):
    assert seen["every"][0]["sent"] == 3 * seen["two"][0]["sent"]
    assert (
        sizes.reduction(model(), 2, 3, "every")[1] == 0 < sizes.reduction(model(), 2, 3, "last")[1]
    )


@pytest.mark.parametrize(("more", "times"), [("", 1), ("--recompute", 2)])
def test_only_with_the_option_a_block_computes_its_forward_pass_again(monkeypatch, more, times):
    computed, compute = [], Block.compute
    monkeypatch.setattr(Block, "compute", lambda *x: computed.append(x[0]) or compute(*x))
    model = Classifier(train.parse(f"{OPTIONS} {more}".split()))
    model(torch.rand(2, 784)).sum().backward()
    assert [computed.count(block) for block in model.blocks] == [times] * 3


def test_ranks_that_do_not_divide_into_sets_are_refused():
    with pytest.raises(group.Stop, match="3 ranks cannot be cut into sets of --shard-within 2"):
        train.mesh_of(torch.device("cpu"), 3, 2)


def test_a_module_that_cannot_make_its_values_is_named():
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, device="meta"))

    with pytest.raises(group.Stop, match="scale has parameters or buffers, but no reset_param"):
        train.fill(Scale(), Scale(), 0, "scale")


LARGE = f"{OPTIONS} --width 8192 --layers 48 --gpu-memory 48"


@pytest.mark.parametrize("more", ["", "--bfloat16"])
def test_the_smallest_number_of_nodes_is_the_first_that_fits(more):
    options = train.parse(f"{LARGE} --reduce every {more}".split())
    with torch.device("meta"):
        large = Classifier(options)
    nodes = sizes.smallest_nodes(large, options, ranks_per_node=8)
    room = (1 - sizes.REST) * 48 * 2**30
    assert nodes > 1
    assert sizes.at_peak(large, 8 * nodes, options) <= room
    assert sizes.at_peak(large, 8 * (nodes - 1), options) > room


def test_a_model_whose_gradients_fit_on_no_rank_is_told_to_reduce_them_earlier():
    options = train.parse(f"{LARGE} --smallest-nodes 8".split())
    with pytest.raises(group.Stop, match="in 48 GiB a GPU; --reduce last holds whole gradients"):
        train.print_smallest(options)


def test_the_script_prints_the_number_of_nodes(capsys):
    train.print_smallest(train.parse(f"{OPTIONS} --smallest-nodes 8".split()))
    assert capsys.readouterr().out == "1\n"
