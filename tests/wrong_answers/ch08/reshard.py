"""Answers to 8.5, `reshard`: wrong in a plausible way, or right in another."""

import copy

import torch

from tests.wrong_answers import right, wrong


def _whole_checkpoint(parts):
    ordered = sorted(parts, key=lambda part: part["rank"])
    n = ordered[0]["world_size"] if ordered else 1
    there = {part["rank"] for part in ordered}
    missing = [rank for rank in range(n) if rank not in there]
    if missing or len(ordered) != n or any(part["world_size"] != n for part in ordered):
        raise ValueError(f"not a whole checkpoint of {n} ranks; missing: {missing}")
    return ordered


def _is_cut(shape, value):
    return len(shape) > 1 and torch.is_tensor(value) and value.dim() > 0


def _cut(whole, n):
    size = -(-whole.numel() // n)
    padded = torch.zeros(n * size, dtype=whole.dtype)
    padded[: whole.numel()] = whole
    return [piece.clone() for piece in padded.view(n, size)]


def _same_everywhere(value, n):
    return [value.clone() if torch.is_tensor(value) else value for _ in range(n)]


class _Resharding:
    """A right answer of small parts; each wrong one below writes one of them wrongly."""

    def order(self, parts):
        return _whole_checkpoint(parts)

    def again(self, shape, values, n):
        if not _is_cut(shape, values[0]):
            return self.uncut(shape, values, n)
        return self.pieces(torch.cat(values)[: shape.numel()], shape, n)

    def uncut(self, shape, values, n):
        return _same_everywhere(values[0], n)

    def pieces(self, whole, shape, n):
        return _cut(whole, n)

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


@right("8.5")
def reshards_in_small_parts(checkpoints, world_size):
    return _Resharding()(checkpoints, world_size)


@right("8.5")
def copies_element_ranges(checkpoints, world_size):
    """Never holds a whole parameter: copies the overlap of each old shard with each new one."""
    parts = _whole_checkpoint(checkpoints)

    def again(shape, values):
        if not _is_cut(shape, values[0]):
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


@wrong("8.5", names="list-order")
def trusts_the_order(checkpoints, world_size):
    class Trusting(_Resharding):
        def order(self, parts):
            _whole_checkpoint(parts)
            return parts

    return Trusting()(checkpoints, world_size)


@wrong("8.5", names="sorted-as-text")
def sorts_ranks_as_text(checkpoints, world_size):
    class Textual(_Resharding):
        def order(self, parts):
            _whole_checkpoint(parts)
            return sorted(parts, key=lambda part: str(part["rank"]))

    return Textual()(checkpoints, world_size)


@wrong("8.5", names="padding-kept")
def cuts_the_padding_too(checkpoints, world_size):
    class Keeping(_Resharding):
        def again(self, shape, values, n):
            if not _is_cut(shape, values[0]):
                return self.uncut(shape, values, n)
            return self.pieces(torch.cat(values), shape, n)

    return Keeping()(checkpoints, world_size)


@wrong("8.5", names="vectors-cut")
def cuts_vectors(checkpoints, world_size):
    class Cutting(_Resharding):
        def uncut(self, shape, values, n):
            if torch.is_tensor(values[0]) and values[0].dim() > 0:
                return _cut(values[0], n)
            return super().uncut(shape, values, n)

    return Cutting()(checkpoints, world_size)


@wrong("8.5", names="whole-everywhere")
def hands_out_the_whole(checkpoints, world_size):
    class Handing(_Resharding):
        def pieces(self, whole, shape, n):
            return [whole.view(shape).clone() for _ in range(n)]

    return Handing()(checkpoints, world_size)


@wrong("8.5", names="matrix-shape")
def cuts_rows(checkpoints, world_size):
    class Rows(_Resharding):
        def pieces(self, whole, shape, n):
            rows = -(-shape[0] // n)
            padded = torch.zeros(n * rows, *shape[1:])
            padded[: shape[0]] = whole.view(shape)
            return [piece.clone() for piece in padded.split(rows)]

    return Rows()(checkpoints, world_size)


@wrong("8.5", names="uneven")
def does_not_pad(checkpoints, world_size):
    class Uneven(_Resharding):
        def pieces(self, whole, shape, n):
            return [piece.clone() for piece in whole.tensor_split(n)]

    return Uneven()(checkpoints, world_size)


@wrong("8.5", names="multiples-only")
def merges_or_splits(checkpoints, world_size):
    class Merging(_Resharding):
        def again(self, shape, values, n):
            if not _is_cut(shape, values[0]) or n == len(values):
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

    return Merging()(checkpoints, world_size)


@wrong("8.5", names="optimizer-left")
def forgets_the_optimizer(checkpoints, world_size):
    made = _Resharding()(checkpoints, world_size)
    for part in made:
        part["optimizer"] = {}
    return made


@wrong("8.5", names="optimizer-left")
def keeps_the_old_state(checkpoints, world_size):
    class Keeping(_Resharding):
        def state(self, name, shape, states, n):
            return [copy.deepcopy(states[rank % len(states)]) for rank in range(n)]

    return Keeping()(checkpoints, world_size)


@wrong("8.5", names="step-cut")
def cuts_every_tensor(checkpoints, world_size):
    class Cutting(_Resharding):
        def state(self, name, shape, states, n):
            made = super().state(name, shape, states, n)
            for rank, new in enumerate(made):
                new["step"] = _cut(states[0]["step"].reshape(1), n)[rank]
            return made

    return Cutting()(checkpoints, world_size)


@wrong("8.5", names="stateless")
def expects_state_everywhere(checkpoints, world_size):
    class Expecting(_Resharding):
        def has_state(self, parts, name):
            return True

    return Expecting()(checkpoints, world_size)


@wrong("8.5", names="rank-and-size")
def keeps_the_labels(checkpoints, world_size):
    class Keeping(_Resharding):
        def labels(self, parts, rank, n):
            return {"rank": rank, "world_size": parts[0]["world_size"]}

    return Keeping()(checkpoints, world_size)


@wrong("8.5", names="missing-rank")
def takes_what_is_there(checkpoints, world_size):
    class Trusting(_Resharding):
        def order(self, parts):
            return sorted(parts, key=lambda part: part["rank"])

        def pieces(self, whole, shape, n):
            padded = torch.zeros(shape.numel())
            padded[: len(whole)] = whole
            return _cut(padded, n)

    return Trusting()(checkpoints, world_size)


@wrong("8.5", names="twice")
def counts_the_parts(checkpoints, world_size):
    class Counting(_Resharding):
        def order(self, parts):
            n = max(part["world_size"] for part in parts)
            if len(parts) < n:
                there = {part["rank"] for part in parts}
                raise ValueError(f"missing: {set(range(n)) - there}")
            return sorted(parts, key=lambda part: part["rank"])

    return Counting()(checkpoints, world_size)


@wrong("8.5", names="other-error")
def looks_ranks_up(checkpoints, world_size):
    class LookingUp(_Resharding):
        def order(self, parts):
            by_rank = {part["rank"]: part for part in parts}
            return [by_rank[rank] for rank in range(parts[0]["world_size"])]

    return LookingUp()(checkpoints, world_size)


@wrong("8.5", names="error-without-rank")
def says_little(checkpoints, world_size):
    try:
        return _Resharding()(checkpoints, world_size)
    except ValueError:
        raise ValueError("This checkpoint is not complete.") from None


@wrong("8.5", names="a-view")
def saves_the_whole(checkpoints, world_size):
    class Viewing(_Resharding):
        def pieces(self, whole, shape, n):
            size = -(-whole.numel() // n)
            padded = torch.zeros(n * size)
            padded[: whole.numel()] = whole
            return list(padded.view(n, size))

    return Viewing()(checkpoints, world_size)


@wrong("8.5", names="input-changed")
def empties_the_parts(checkpoints, world_size):
    made = _Resharding()(checkpoints, world_size)
    for part in checkpoints:
        part["optimizer"].clear()
    return made


@wrong("8.5", names="twice")
def asks_which_ranks_are_there(checkpoints, world_size):
    """A part that comes twice is left out without a word."""
    last = {part["rank"]: part for part in checkpoints}
    return _Resharding()(list(last.values()), world_size)


@wrong("8.5", names="other-dtype")
def makes_room_in_float32(checkpoints, world_size):
    class Making(_Resharding):
        def pieces(self, whole, shape, n):
            padded = torch.zeros(n * -(-whole.numel() // n))
            padded[: whole.numel()] = whole
            return [piece.clone() for piece in padded.chunk(n)]

    return Making()(checkpoints, world_size)


@wrong("8.5", names="fewer-pieces")
def cuts_into_chunks(checkpoints, world_size):
    """`chunk` gives no empty pieces."""

    class Chunking(_Resharding):
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

    return Chunking()(checkpoints, world_size)


@wrong("8.5", names="padding-inside")
def pads_each_piece(checkpoints, world_size):
    class Splitting(_Resharding):
        def pieces(self, whole, shape, n):
            parts = whole.tensor_split(n)
            size = len(parts[0])
            return [torch.cat([p, p.new_zeros(size - len(p))]) for p in parts]

    return Splitting()(checkpoints, world_size)


@wrong("8.5", names="three-dimensions")
def knows_matrices_only(checkpoints, world_size):
    class Matrices(_Resharding):
        def again(self, shape, values, n):
            return super().again(shape if len(shape) == 2 else torch.Size(), values, n)

    return Matrices()(checkpoints, world_size)


@wrong("8.5", names="one-element")
def takes_one_element_for_a_number(checkpoints, world_size):
    class Counting(_Resharding):
        def again(self, shape, values, n):
            single = torch.is_tensor(values[0]) and values[0].numel() == 1
            return super().again(torch.Size() if single else shape, values, n)

    return Counting()(checkpoints, world_size)


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
    return _Resharding()(checkpoints, world_size)


@wrong("8.5", names="twice")
def looks_at_one_world_size(checkpoints, world_size):
    class Trusting(_Resharding):
        def order(self, parts):
            n = min((part["world_size"] for part in parts[:1]), default=1)
            return _whole_checkpoint([{**part, "world_size": n} for part in parts])

    return Trusting()(checkpoints, world_size)


@wrong("8.5", names="other-error")
def expects_a_first_part(checkpoints, world_size):
    assert checkpoints[0]["shapes"]
    return _Resharding()(checkpoints, world_size)


@wrong("8.5", names="shared")
def hands_the_same_parts_back(checkpoints, world_size):
    whole = _whole_checkpoint(checkpoints)
    return whole if world_size == len(whole) else _Resharding()(checkpoints, world_size)


@wrong("8.5", names="missing-rank")
def copies_as_many_as_there_are(checkpoints, world_size):
    """Nothing to do for as many ranks as before, it thinks, before it has looked at the parts."""
    if world_size == len(checkpoints):
        return copy.deepcopy(sorted(checkpoints, key=lambda part: part["rank"]))
    return _Resharding()(checkpoints, world_size)


@wrong("8.5", names="a-view")
def cuts_nothing_for_one_rank(checkpoints, world_size):
    class Whole(_Resharding):
        def again(self, shape, values, n):
            if n == 1 and _is_cut(shape, values[0]):
                return [torch.cat(values)[: shape.numel()]]
            return super().again(shape, values, n)

    return Whole()(checkpoints, world_size)


@wrong("8.5", names="error-without-rank")
def says_which_there_should_be(checkpoints, world_size):
    try:
        return _Resharding()(checkpoints, world_size)
    except ValueError:
        n = max((part["world_size"] for part in checkpoints), default=1)
        raise ValueError(f"asked are the parts of the ranks {list(range(n))}") from None


@wrong("8.5", names="shared")
def hands_on_what_is_not_cut(checkpoints, world_size):
    parts = _Resharding()(checkpoints, world_size)
    old = min(checkpoints, key=lambda part: part["rank"])["optimizer"]
    for part in parts:
        for name, state in part["optimizer"].items():
            state.update((k, v) for k, v in old[name].items() if torch.is_tensor(v) and not v.dim())
    return parts
