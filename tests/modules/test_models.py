import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from course_utils.lesson.models import (
    Attention,
    Block,
    FeedForward,
    GroupedAttention,
    LanguageModel,
    MnistConvNet,
    MnistNet,
)


@pytest.fixture(autouse=True)
def one_thread():
    """On busy cores, two threads make small models many times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_mnist_net_has_the_sizes_of_the_articles():
    shapes = {name: tuple(p.shape) for name, p in MnistNet().named_parameters()}
    assert shapes == {
        "linear1.weight": (50, 784),
        "linear1.bias": (50,),
        "linear2.weight": (10, 50),
        "linear2.bias": (10,),
    }
    assert count(MnistNet()) == 39_760


def test_mnist_net_flattens_images():
    model = MnistNet()
    images = torch.rand(3, 1, 28, 28)
    assert model(images).shape == (3, 10)
    assert torch.equal(model(images), model(images.reshape(3, 784)))


def test_mnist_net_has_a_relu_between_its_layers():
    model = MnistNet()
    with torch.no_grad():
        model.linear1.bias.fill_(-1e6)  # every hidden value is negative: only the bias is left
        logits = model(torch.rand(2, 784))
    assert torch.equal(logits, model.linear2.bias.detach().expand(2, 10))


def test_mnist_conv_net_can_be_cut_anywhere():
    model = MnistConvNet()
    images = torch.rand(3, 1, 28, 28)
    assert count(model) == 52_138
    assert model(images).shape == (3, 10)
    for cut in range(1, len(model.layers)):
        first, second = model.layers[:cut], model.layers[cut:]
        assert torch.equal(second(first(images)), model(images))
        assert count(first) + count(second) == count(model)


@pytest.mark.parametrize(("width", "heads"), [(8, 1), (12, 3), (24, 8)])
def test_parts_of_a_transformer_have_the_parameters_of_their_formulas(width, heads):
    assert count(Attention(width, heads)) == 4 * width**2 + 4 * width
    assert count(FeedForward(width)) == 8 * width**2 + 5 * width
    assert count(FeedForward(width, 7)) == 2 * 7 * width + 7 + width
    assert count(Block(width, heads)) == 12 * width**2 + 13 * width


@pytest.mark.parametrize("tied", [False, True])
def test_language_model_has_the_parameters_of_its_formula(tied):
    w, v, c, layers = 12, 30, 9, 3
    model = LanguageModel(v, w, 3, layers, c, tied=tied)
    expected = layers * (12 * w**2 + 13 * w) + (2 * v + c + 2) * w - (v * w if tied else 0)
    assert count(model) == expected
    assert (model.head.weight is model.token.weight) == tied


def test_attention_is_that_of_pytorch():
    """nn.MultiheadAttention keeps q, k, v and their heads in the same order of rows."""
    torch.manual_seed(0)
    ours, torchs = Attention(12, 3), nn.MultiheadAttention(12, 3, batch_first=True)
    torchs.in_proj_weight, torchs.in_proj_bias = ours.qkv.weight, ours.qkv.bias
    torchs.out_proj = ours.out
    x = torch.randn(2, 5, 12)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    expected, _ = torchs(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
    torch.testing.assert_close(ours(x), expected)


def test_attention_names_a_width_that_does_not_divide():
    with pytest.raises(ValueError, match="width of 10 does not divide among 4 heads"):
        Attention(10, 4)


def test_grouped_attention_is_attention_whose_keys_and_values_are_repeated():
    torch.manual_seed(0)
    grouped, plain, x = GroupedAttention(24, 6, 2), Attention(24, 6), torch.randn(2, 5, 24)
    for of_plain, of_grouped in zip(plain.qkv.parameters(), grouped.qkv.parameters(), strict=True):
        q, *keys_and_values = of_grouped.detach().unflatten(0, (-1, 4)).split([6, 2, 2])
        repeated = [part.repeat_interleave(3, dim=0) for part in keys_and_values]
        of_plain.data = torch.cat([q, *repeated]).flatten(0, 1)
    plain.out = grouped.out
    torch.testing.assert_close(grouped(x), plain(x))


def test_grouped_attention_names_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="6 heads of queries do not divide among 4 of keys"):
        GroupedAttention(24, 6, 4)


def test_block_adds_each_half_to_its_input():
    torch.manual_seed(0)
    block, x = Block(8, 2), torch.randn(2, 3, 8)
    middle = x + block.attention(block.norm1(x))
    torch.testing.assert_close(block(x), middle + block.feed_forward(block.norm2(middle)))
    with torch.no_grad():
        for layer in (block.attention.out, block.feed_forward.down):
            layer.weight.zero_()
            layer.bias.zero_()
    assert torch.equal(block(x), x)


def test_no_token_sees_a_later_one():
    torch.manual_seed(0)
    model = LanguageModel(20, 16, 4, 2, 8)
    tokens = torch.randint(20, (3, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 20
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_positions_matter():
    torch.manual_seed(0)
    model = LanguageModel(20, 16, 4, 1, 8)
    logits = model(torch.full((1, 8), 3))
    assert not torch.allclose(logits[0, 0], logits[0, 7])


@pytest.mark.parametrize("tied", [False, True])
def test_language_model_begins_without_an_opinion_and_learns(tied):
    torch.manual_seed(0)
    model = LanguageModel(20, 32, 4, 2, 16, tied=tied)
    tokens = torch.arange(17).repeat(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    losses = []
    for _ in range(30):
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] < math.log(20) + 1.5
    assert losses[-1] < losses[0] / 2


def test_the_articles_model_fits_on_the_meta_device():
    """50,000 tokens, 24 layers of width 2048: 1.4 billion parameters, and none of them in memory."""
    with torch.device("meta"):
        model = LanguageModel(50_000, 2048, 16, 24, 512)
        logits = model(torch.zeros(4, 512, dtype=torch.int64))
    assert all(p.device.type == "meta" for p in model.parameters())
    assert count(model) == 24 * (12 * 2048**2 + 13 * 2048) + (2 * 50_000 + 512 + 2) * 2048
    assert logits.shape == (4, 512, 50_000)
