"""Trains a small transformer to continue a text, one character at a time, with a device for each rank.

torchrun --nproc-per-node 2 mine/train.py --text ../data/text/the_long_shed.txt --out runs/first
"""

import argparse
import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    get_worker_info,
)

# Shapes: N windows in a batch, T characters in a window, W the width, H heads.
IGNORED = -100  # the target of a place that only fills a row up


class Windows(Dataset):
    """A text cut into windows of `context` characters; a target is the character that follows."""

    def __init__(self, text: str, context: int) -> None:
        self.characters = sorted(set(text))
        number = {character: i for i, character in enumerate(self.characters)}
        self.tokens = torch.tensor([number[character] for character in text])
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        start = i * self.context
        window = self.tokens[start : start + self.context + 1]
        return window[:-1], window[1:]


class Sentences(IterableDataset):
    """A stream of a text's sentences, cut off after `context` characters; a micro-batch belongs to one rank's worker.

    All ranks give `steps` times `accumulate` micro-batches: a rank with more would wait for the others for ever.
    """

    def __init__(self, windows: Windows, text: str, options: argparse.Namespace) -> None:
        found = [match.span() for match in re.finditer(r"[^.?!]{2,}", text)]
        ends = [(start, min(end, start + options.context + 1)) for start, end in found]
        self.sentences = [windows.tokens[start:end] for start, end in ends]
        self.learned = len(self.sentences) * 9 // 10
        self.steps = self.learned // options.batch
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.size = options.batch // self.world // options.accumulate
        self.micro_batches = self.steps * options.accumulate * self.world

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for number in range(self.rank, self.micro_batches, self.world):
            if number // self.world % workers == worker:
                for sentence in self.sentences[number * self.size : (number + 1) * self.size]:
                    yield sentence[:-1], sentence[1:]

    def held_out(self) -> list[tuple[Tensor, Tensor]]:
        """Those of this rank."""
        own = self.sentences[self.learned + self.rank :: self.world]
        return [(sentence[:-1], sentence[1:]) for sentence in own]


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Samples of different lengths as one batch (N, T)."""
    inputs, targets = zip(*samples, strict=True)
    return pad_sequence(inputs, batch_first=True), pad_sequence(
        targets, batch_first=True, padding_value=IGNORED
    )


class Attention(nn.Module):
    """Causal self-attention; `heads` heads of queries share `kv_heads` heads of keys and values."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.wq = nn.Linear(width, heads * self.head_width, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.wo = nn.Linear(heads * self.head_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (  # each (N, its heads, T, head width)
            linear(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: one product decides how much of the other passes."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads)
        self.feed_forward_norm = nn.RMSNorm(width)
        self.feed_forward = FeedForward(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.width
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(options.context, width)
        self.blocks = nn.ModuleList(
            Block(width, options.heads, options.kv_heads) for _ in range(options.layers)
        )
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits (N, T, V) of tokens (N, T)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a batch, summed over its characters."""
    logits = model(inputs).flatten(0, 1)
    return cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


def characters(targets: Tensor) -> int:
    """How many characters a batch has, without those that fill its rows up."""
    return (targets != IGNORED).sum().item()


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader, device: torch.device) -> float:
    """The mean loss over all characters, those of the other ranks included."""
    model.eval()
    total, count = 0.0, 0
    for inputs, targets in batches:
        total += loss_of(model, inputs.to(device), targets.to(device)).item()
        count += characters(targets)
    model.train()
    total, count = sum_over_ranks(total, count, device=device)
    return total / count


def sum_over_ranks(*numbers: float, device: torch.device) -> list[float]:
    """Each number, added up over all ranks."""
    summed = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    return summed.tolist()


def options_of_the_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--text", type=Path, required=True, help="a file to learn from")
    add("--out", type=Path, required=True, help="a folder for the log and the model")
    add("--epochs", type=int, default=3)
    add("--batch", type=int, default=32, help="windows in a step, on all ranks together")
    add("--rate", type=float, default=0.5)
    add("--seed", type=int, default=0)
    add("--context", type=int, default=32, help="characters in a window")
    add("--width", type=int, default=64)
    add("--heads", type=int, default=4)
    add("--kv-heads", type=int, default=2)
    add("--layers", type=int, default=2)
    add("--accumulate", type=int, default=1, help="micro-batches of a rank in a step")
    add("--sentences", action="store_true", help="read a stream of sentences in place of windows")
    add("--workers", type=int, default=0, help="processes of a rank that read the sentences")
    return parser.parse_args()


def main() -> None:
    options = options_of_the_command_line()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()

    text = options.text.read_text()
    windows = Windows(text, options.context)
    share = options.batch // world // options.accumulate
    if options.sentences:
        stream = Sentences(windows, text, options)
        steps, sampler = stream.steps, None
        batches = DataLoader(stream, share, num_workers=options.workers, collate_fn=padded)
        held_out_batches = DataLoader(stream.held_out(), share, collate_fn=padded)
    else:
        learned = len(windows) * 9 // 10
        steps = learned // options.batch
        train = Subset(windows, range(learned))
        # Not with a DistributedSampler, which repeats windows until all ranks have as many.
        held_out = Subset(windows, range(learned + rank, len(windows), world))
        sampler = DistributedSampler(train, seed=options.seed)
        batches = DataLoader(train, share, sampler=sampler, drop_last=True)
        held_out_batches = DataLoader(held_out, share)

    torch.manual_seed(options.seed)
    model = Transformer(len(windows.characters), options).to(device)
    parallel = DistributedDataParallel(model, device_ids=[device] if gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate, momentum=0.9)

    options.out.mkdir(parents=True, exist_ok=True)
    log = (options.out / "log.jsonl").open("w") if rank == 0 else None
    for epoch in range(options.epochs):
        if sampler:
            sampler.set_epoch(epoch)
        summed, count, reading = 0.0, 0, iter(batches)
        for _ in range(steps):
            micro_batches = list(itertools.islice(reading, options.accumulate))
            # Sentences differ in length: the mean is over the characters of all ranks and micro-batches.
            own = sum(characters(targets) for _, targets in micro_batches)
            [in_step] = sum_over_ranks(own, device=device)
            optimizer.zero_grad()
            for number, (inputs, targets) in enumerate(micro_batches, 1):
                last = number == options.accumulate
                with contextlib.nullcontext() if last else parallel.no_sync():
                    loss = loss_of(parallel, inputs.to(device), targets.to(device))
                    (loss * world / in_step).backward()  # DDP divides by the world size
                summed += loss.item()
            count += in_step
            optimizer.step()
        [summed] = sum_over_ranks(summed, device=device)
        line = {
            "epoch": epoch,
            "loss": summed / count,
            "held_out_loss": evaluate(model, held_out_batches, device),
        }
        if rank == 0:
            print("epoch {epoch}: loss {loss:.2f}, held out {held_out_loss:.2f}".format(**line))
            log.write(json.dumps(line) + "\n")
    if rank == 0:
        torch.save(model.state_dict(), options.out / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
