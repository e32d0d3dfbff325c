"""Rarer wrong answers to 8.5, `reshard`."""

import copy

import torch

from tests.wrong_answers import rarer
from tests.wrong_answers.ch08.reshard import Resharding, answering, cut, is_cut, whole_checkpoint


@rarer("8.5")
@answering
class sorts_ranks_as_text(Resharding):
    def order(self, parts):
        whole_checkpoint(parts)
        return sorted(parts, key=lambda part: str(part["rank"]))


@rarer("8.5")
@answering
class merges_or_splits(Resharding):
    def again(self, shape, values, n):
        if not is_cut(shape, values[0]) or n == len(values):
            return values if n == len(values) else super().again(shape, values, n)
        if n < len(values):
            step = len(values) // n
            return [torch.cat(values[r * step : (r + 1) * step]) for r in range(n)]
        step = n // len(values)
        return [piece.clone() for value in values for piece in value.chunk(step)]

    def __call__(self, parts, n):
        made = super().__call__(parts, n)
        assert len(made) == n
        return made


@rarer("8.5")
@answering
class expects_state_everywhere(Resharding):
    def has_state(self, parts, name):
        return True


@rarer("8.5")
@answering
class counts_the_parts(Resharding):
    def order(self, parts):
        n = max(part["world_size"] for part in parts)
        if len(parts) < n:
            there = {part["rank"] for part in parts}
            raise ValueError(f"missing: {set(range(n)) - there}")
        return sorted(parts, key=lambda part: part["rank"])


@rarer("8.5")
def says_little(checkpoints, world_size):
    try:
        return Resharding()(checkpoints, world_size)
    except ValueError:
        raise ValueError("This checkpoint is not complete.") from None


@rarer("8.5")
def asks_which_ranks_are_there(checkpoints, world_size):
    """A part that comes twice is left out without a word."""
    last = {part["rank"]: part for part in checkpoints}
    return Resharding()(list(last.values()), world_size)


@rarer("8.5")
@answering
class cuts_into_chunks(Resharding):
    """`chunk` gives no empty pieces."""

    def again(self, shape, values, n):
        made = super().again(shape, values, n)
        return made + [None] * (n - len(made))

    def pieces(self, whole, shape, n):
        chunks = whole.chunk(n)
        size = len(chunks[0])
        return [torch.cat([c, c.new_zeros(size - len(c))]) for c in chunks]

    def __call__(self, parts, n):
        made = super().__call__(parts, n)
        for part in made:
            kept = part["parameters"].items()
            part["parameters"] = {name: value for name, value in kept if value is not None}
        return made


@rarer("8.5")
@answering
class pads_each_piece(Resharding):
    def pieces(self, whole, shape, n):
        parts = whole.tensor_split(n)
        size = len(parts[0])
        return [torch.cat([p, p.new_zeros(size - len(p))]) for p in parts]


@rarer("8.5")
@answering
class knows_matrices_only(Resharding):
    def again(self, shape, values, n):
        return super().again(shape if len(shape) == 2 else torch.Size(), values, n)


@rarer("8.5")
@answering
class takes_one_element_for_a_number(Resharding):
    def again(self, shape, values, n):
        single = torch.is_tensor(values[0]) and values[0].numel() == 1
        return super().again(torch.Size() if single else shape, values, n)


@rarer("8.5")
@answering
class looks_at_one_world_size(Resharding):
    def order(self, parts):
        n = min((part["world_size"] for part in parts[:1]), default=1)
        return whole_checkpoint([{**part, "world_size": n} for part in parts])


@rarer("8.5")
def expects_a_first_part(checkpoints, world_size):
    assert checkpoints[0]["shapes"]
    return Resharding()(checkpoints, world_size)


@rarer("8.5")
def hands_the_same_parts_back(checkpoints, world_size):
    whole = whole_checkpoint(checkpoints)
    return whole if world_size == len(whole) else Resharding()(checkpoints, world_size)


@rarer("8.5")
def copies_as_many_as_there_are(checkpoints, world_size):
    """Nothing to do for as many ranks as before, it thinks, before it has looked at the parts."""
    if world_size == len(checkpoints):
        return copy.deepcopy(sorted(checkpoints, key=lambda part: part["rank"]))
    return Resharding()(checkpoints, world_size)


@rarer("8.5")
@answering
class cuts_nothing_for_one_rank(Resharding):
    def again(self, shape, values, n):
        if n == 1 and is_cut(shape, values[0]):
            return [torch.cat(values)[: shape.numel()]]
        return super().again(shape, values, n)


@rarer("8.5")
def says_which_there_should_be(checkpoints, world_size):
    try:
        return Resharding()(checkpoints, world_size)
    except ValueError:
        n = max((part["world_size"] for part in checkpoints), default=1)
        raise ValueError(f"asked are the parts of the ranks {list(range(n))}") from None


@rarer("8.5")
@answering
class cuts_every_tensor(Resharding):
    def state(self, name, shape, states, n):
        made = super().state(name, shape, states, n)
        for rank, new in enumerate(made):
            new["step"] = cut(states[0]["step"].reshape(1), n)[rank]
        return made
