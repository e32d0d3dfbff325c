"""The models that several chapters share.

Shapes: N examples, T tokens, W the width, H heads, V the size of the vocabulary. All models can be
built under `torch.device("meta")`, where they have shapes and no memory.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class MnistNet(nn.Module):
    """The 784-50-10 network: two linear layers with a ReLU between them, 39,760 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(784, 50)
        self.linear2 = nn.Linear(50, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits (N, 10) of images (N, 1, 28, 28), or of any (N, ...) of 784 numbers."""
        hidden = torch.relu(self.linear1(images.flatten(1)))  # (N, 50)
        return self.linear2(hidden)


class MnistConvNet(nn.Module):
    """A convolutional classifier for MNIST, 52,138 parameters.

    Its `layers` are one nn.Sequential: `model.layers[:6]` is a stage of the model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),  # (N, 8, 28, 28)
            nn.ReLU(),
            nn.MaxPool2d(2),  # (N, 8, 14, 14)
            nn.Conv2d(8, 16, 3, padding=1),  # (N, 16, 14, 14)
            nn.ReLU(),
            nn.MaxPool2d(2),  # (N, 16, 7, 7)
            nn.Flatten(),  # (N, 784)
            nn.Linear(784, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits (N, 10) of images (N, 1, 28, 28)."""
        return self.layers(images)


def uneven_line() -> nn.Sequential:
    """Eight stations whose work is very uneven, from images (N, 1, 28, 28) to logits (N, 10), with
    the same parameters in every call."""
    torch.manual_seed(0)

    def conv(channels: int, more: int, *after: nn.Module) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels, more, 3, padding=1), nn.ReLU(), *after)

    return nn.Sequential(
        conv(1, 64),
        conv(64, 64, nn.MaxPool2d(2)),  # (N, 64, 14, 14)
        conv(64, 64),
        conv(64, 64, nn.MaxPool2d(2)),  # (N, 64, 7, 7)
        nn.Sequential(nn.Flatten(), nn.Linear(3136, 256), nn.ReLU()),
        nn.Sequential(nn.Linear(256, 256), nn.ReLU()),
        nn.Sequential(nn.Linear(256, 256), nn.ReLU()),
        nn.Linear(256, 10),
    )


class Attention(nn.Module):
    """Causal self-attention over several heads, 4 W² + 4 W parameters (Vaswani et al. 2017, 3.2).

    The rows of `qkv.weight` are those of all queries, then all keys, then all values; within each,
    a head's rows lie together: row `part * width + head * head_width + i`.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"A width of {width} does not divide among {heads} heads.")
        self.heads = heads
        self.head_width = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns (N, T, W); a token sees itself and those before it."""
        n, t, _ = x.shape
        parts = self.qkv(x).view(n, t, 3, self.heads, self.head_width)
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # each (N, H, T, W / H)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class GroupedAttention(Attention):
    """Grouped-query attention: several heads of queries share one head of keys and values (Ainslie et al. 2023).

    The rows of `qkv.weight` are the queries of `heads` heads, then the keys of `kv_heads` heads, then as many
    values; within each, a head's rows lie together. Head h of the queries goes with head
    h // (heads // kv_heads) of the keys and values.
    """

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__(width, heads)
        if heads % kv_heads:
            raise ValueError(f"{heads} heads of queries do not divide among {kv_heads} of keys.")
        self.kv_heads = kv_heads
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_width)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns (N, T, W); a token sees itself and those before it."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them, 8 W² + 5 W parameters.

    With another hidden size h than 4 W, there are 2 h W + h + W.
    """

    def __init__(self, width: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = hidden or 4 * width
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns (..., W)."""
        return self.down(gelu(self.up(x)))


class ResidualNet(nn.Module):
    """A first layer from 49 pixels, blocks of width W that add to what they get, and a last layer.

    With L blocks it has L (8 W² + 5 W) + 60 W + 10 parameters.
    """

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(49, width)
        self.blocks = nn.ModuleList(FeedForward(width) for _ in range(blocks))
        self.last = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits (N, 10) of images (N, 49)."""
        x = self.first(images)  # (N, W)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class Block(nn.Module):
    """A transformer's block, with the norms first: 12 W² + 13 W parameters.

    Each half is added to its own input (Radford et al. 2019, section 2.3).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns (N, T, W)."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class LanguageModel(nn.Module):
    """A decoder-only transformer that predicts each next token.

    With L layers and a context of C tokens it has L (12 W² + 13 W) + (2 V + C + 2) W parameters.
    With `tied=True` the head's weight is the token embedding's, and there are V W fewer.
    """

    def __init__(
        self, vocabulary: int, width: int, heads: int, layers: int, context: int, tied: bool = False
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # with this deviation a tied head begins with logits near 1, not near the root of the width
        nn.init.normal_(self.token.weight, std=width**-0.5)
        nn.init.normal_(self.position.weight, std=width**-0.5)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits (N, T, V) of tokens (N, T), int64; T is at most the context."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)  # (N, T, W)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
