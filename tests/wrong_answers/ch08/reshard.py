"""Answers to 8.5, `reshard`: wrong in a plausible way, or right in another."""

import torch

from tests.wrong_answers import right, wrong


def whole_checkpoint(parts):
    ordered = sorted(parts, key=lambda part: part["rank"])
    n = ordered[0]["world_size"] if ordered else 1
    there = {part["rank"] for part in ordered}
    missing = [rank for rank in range(n) if rank not in there]
    if missing or len(ordered) != n or any(part["world_size"] != n for part in ordered):
        raise ValueError(f"not a whole checkpoint of {n} ranks; missing: {missing}")
    return ordered


def is_cut(shape, value):
    return len(shape) > 1 and torch.is_tensor(value) and value.dim() > 0


def cut(whole, n):
    size = -(-whole.numel() // n)
    padded = torch.zeros(n * size, dtype=whole.dtype)
    padded[: whole.numel()] = whole
    return [piece.clone() for piece in padded.view(n, size)]


def _same_everywhere(value, n):
    return [value.clone() if torch.is_tensor(value) else value for _ in range(n)]


class Resharding:
    """A right answer of small parts; each wrong one below writes one of them wrongly."""

    def order(self, parts):
        return whole_checkpoint(parts)

    def again(self, shape, values, n):
        if not is_cut(shape, values[0]):
            return self.uncut(shape, values, n)
        return self.pieces(torch.cat(values)[: shape.numel()], shape, n)

    def uncut(self, shape, values, n):
        return _same_everywhere(values[0], n)

    def pieces(self, whole, shape, n):
        return cut(whole, n)

    def state(self, name, shape, states, n):
        keys = states[0]
        cut = {key: self.again(shape, [state[key] for state in states], n) for key in keys}
        return [{key: cut[key][rank] for key in keys} for rank in range(n)]

    def __call__(self, parts, n):
        parts = self.order(parts)
        shapes = parts[0]["shapes"]
        made = [self.labels(parts, rank, n) | {"shapes": shapes} for rank in range(n)]
        for new in made:
            new["parameters"], new["optimizer"] = {}, {}
        for name, shape in shapes.items():
            values = self.again(shape, [part["parameters"][name] for part in parts], n)
            for new, value in zip(made, values, strict=True):
                new["parameters"][name] = value
            if self.has_state(parts, name):
                states = [part["optimizer"][name] for part in parts]
                for new, state in zip(made, self.state(name, shape, states, n), strict=True):
                    new["optimizer"][name] = state
        return made

    def has_state(self, parts, name):
        return name in parts[0]["optimizer"]

    def labels(self, parts, rank, n):
        return {"rank": rank, "world_size": n}


def answering(cls):
    """The function that reshards as this class does."""

    def reshards(checkpoints, world_size):
        return cls()(checkpoints, world_size)

    reshards.__name__ = cls.__name__
    return reshards


@right("8.5")
def reshards_in_small_parts(checkpoints, world_size):
    return Resharding()(checkpoints, world_size)


@right("8.5")
def copies_element_ranges(checkpoints, world_size):
    """Never holds a whole parameter: copies the overlap of each old shard with each new one."""
    parts = whole_checkpoint(checkpoints)

    def again(shape, values):
        if not is_cut(shape, values[0]):
            return _same_everywhere(values[0], world_size)
        old, new = len(values[0]), -(-shape.numel() // world_size)
        shards = [values[0].new_zeros(new) for _ in range(world_size)]
        for index in range(shape.numel()):
            shards[index // new][index % new] = values[index // old][index % old]
        return shards

    made = []
    for rank in range(world_size):
        made.append({"rank": rank, "world_size": world_size, "shapes": parts[0]["shapes"]})
        made[-1] |= {"parameters": {}, "optimizer": {}}
    for name, shape in parts[0]["shapes"].items():
        for new, value in zip(made, again(shape, [p["parameters"][name] for p in parts])):
            new["parameters"][name] = value
        for key in parts[0]["optimizer"].get(name, ()):
            values = [part["optimizer"][name][key] for part in parts]
            for new, value in zip(made, again(shape, values)):
                new["optimizer"].setdefault(name, {})[key] = value
    return made


@wrong("8.5", names="order")
@answering
class trusts_the_order(Resharding):
    def order(self, parts):
        whole_checkpoint(parts)
        return parts


@wrong("8.5", names="pieces")
@answering
class cuts_the_padding_too(Resharding):
    def again(self, shape, values, n):
        if not is_cut(shape, values[0]):
            return self.uncut(shape, values, n)
        return self.pieces(torch.cat(values), shape, n)


@wrong("8.5", names="what-is-cut")
@answering
class cuts_vectors(Resharding):
    def uncut(self, shape, values, n):
        if torch.is_tensor(values[0]) and values[0].dim() > 0:
            return cut(values[0], n)
        return super().uncut(shape, values, n)


@wrong("8.5", names="pieces")
@answering
class cuts_rows(Resharding):
    def pieces(self, whole, shape, n):
        rows = -(-shape[0] // n)
        padded = torch.zeros(n * rows, *shape[1:])
        padded[: shape[0]] = whole.view(shape)
        return [piece.clone() for piece in padded.split(rows)]


@wrong("8.5", names="optimizer-left")
def forgets_the_optimizer(checkpoints, world_size):
    made = Resharding()(checkpoints, world_size)
    for part in made:
        part["optimizer"] = {}
    return made


@wrong("8.5", names="what-is-cut")
@answering
class puts_steps_together(Resharding):
    def again(self, shape, values, n):
        if len(shape) < 2:
            return self.uncut(shape, values, n)
        return self.pieces(torch.cat(values)[: shape.numel()], shape, n)


@wrong("8.5", names="labels")
@answering
class keeps_the_labels(Resharding):
    def labels(self, parts, rank, n):
        return {"rank": rank, "world_size": parts[0]["world_size"]}


@wrong("8.5", names="not-refused")
@answering
class takes_what_is_there(Resharding):
    def order(self, parts):
        return sorted(parts, key=lambda part: part["rank"])

    def pieces(self, whole, shape, n):
        padded = torch.zeros(shape.numel())
        padded[: len(whole)] = whole
        return cut(padded, n)


@wrong("8.5", names="not-refused")
@answering
class looks_ranks_up(Resharding):
    def order(self, parts):
        by_rank = {part["rank"]: part for part in parts}
        return [by_rank[rank] for rank in range(parts[0]["world_size"])]


@wrong("8.5", names="memory")
@answering
class saves_the_whole(Resharding):
    def pieces(self, whole, shape, n):
        size = -(-whole.numel() // n)
        padded = torch.zeros(n * size)
        padded[: whole.numel()] = whole
        return list(padded.view(n, size))


@wrong("8.5", names="input-changed")
def empties_the_parts(checkpoints, world_size):
    made = Resharding()(checkpoints, world_size)
    for part in checkpoints:
        part["optimizer"].clear()
    return made


@wrong("8.5", names="other-dtype")
@answering
class makes_room_in_float32(Resharding):
    def pieces(self, whole, shape, n):
        padded = torch.zeros(n * -(-whole.numel() // n))
        padded[: whole.numel()] = whole
        return [piece.clone() for piece in padded.chunk(n)]


@right("8.5")
def looks_at_the_parts_one_by_one(checkpoints, world_size):
    found = {}
    for part in checkpoints:
        found.setdefault(part["world_size"], {}).setdefault(part["rank"], []).append(part)
    if len(found) != 1:
        raise ValueError(f"parts of runs on {sorted(found)} ranks; of none, rank 0 is missing")
    [(n, by_rank)] = found.items()
    for rank in range(n):
        if rank not in by_rank:
            raise ValueError(f"rank {rank} of {n} is not there")
    if any(len(same_rank) > 1 for same_rank in by_rank.values()) or len(by_rank) > n:
        raise ValueError("more parts than ranks")
    return Resharding()(checkpoints, world_size)


@wrong("8.5", names="memory")
def hands_on_what_is_not_cut(checkpoints, world_size):
    parts = Resharding()(checkpoints, world_size)
    old = min(checkpoints, key=lambda part: part["rank"])["optimizer"]
    for part in parts:
        for name, state in part["optimizer"].items():
            state.update((k, v) for k, v in old[name].items() if torch.is_tensor(v) and not v.dim())
    return parts
