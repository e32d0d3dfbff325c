"""What chapter 10 says of cuts, against PyTorch's own, and its figures."""

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.text import Text
from torch import Tensor

from course_exercises.authoring import load_answer, load_code
from course_utils.figures import ch10 as figures
from tests.modules.test_plots import overlaps

LAYOUTS = {
    name: load_code(10, function)
    for name, function in (("blocks", "blocks"), ("zig-zag", "zigzag"))
}


def head_tail(length: int, ranks: int) -> Tensor:
    """The places that PyTorch's `context_parallel` hands out, rank by rank; its names are private."""
    try:
        from torch.distributed.tensor.experimental._attention import (
            _HeadTailLoadBalancer as balancer,
        )
    except ImportError as error:
        pytest.skip(f"this PyTorch keeps its balancer elsewhere: {error}")
    return balancer(length, ranks, "cpu")._generate_indices().flatten().long()


@pytest.mark.parametrize(("length", "ranks"), [(8, 1), (8, 2), (24, 3), (64, 4), (16, 8)])
def test_the_zigzag_is_pytorchs_cut_by_head_and_tail(length, ranks):
    positions, answer = load_code(10, "positions"), load_answer("10.2")
    ours = [positions(LAYOUTS["zig-zag"], rank, ranks, length) for rank in range(ranks)]
    assert torch.equal(torch.cat(ours), head_tail(length, ranks))
    assert torch.equal(
        torch.cat([answer([length], ranks, r) for r in range(ranks)]), torch.cat(ours)
    )


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_the_figures_cut_as_the_chapter_does(name, ranks):
    for rank in range(ranks):
        assert figures.LAYOUTS[name](rank, ranks) == LAYOUTS[name](rank, ranks)


def test_the_work_of_four_ranks():
    work = {name: [figures.pairs_of(r, 4, cut) for r in range(4)] for name, cut in LAYOUTS.items()}
    assert work == {"blocks": [2, 6, 10, 14], "zig-zag": [8, 8, 8, 8]}


@pytest.mark.parametrize(
    "draw",
    [
        figures.buildings,
        lambda: figures.travels(4),
        lambda: figures.shares(4),
        lambda: figures.explored("blocks", 4, 4096),
        lambda: figures.explored("zig-zag", 7, 16_384),
    ],
)
def test_no_label_lies_on_another(draw):
    figure = draw()
    assert not list(overlaps(figure))
    plt.close(figure)


def test_the_explorer_leaves_an_odd_token_out():
    """A rank holds two chunks of equal length."""
    said = [
        [text.get_text() for text in figure.findobj(Text)]
        for figure in (figures.explored("zig-zag", 3, tokens) for tokens in (1025, 1024))
    ]
    plt.close("all")
    assert said[0] == said[1] and any("3 x 1,024 tokens" in words for words in said[0])
