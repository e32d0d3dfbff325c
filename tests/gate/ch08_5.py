"""8.5, `reshard`: answers written from the stub alone."""

from copy import deepcopy
from math import prod

import torch


def in_order(checkpoints):
    """The parts by rank. Raises ValueError, with a rank that is missing, where they are not all."""
    if not checkpoints:
        raise ValueError("There are no parts: rank 0 is missing.")
    parts = sorted(checkpoints, key=lambda part: part["rank"])
    found = [part["rank"] for part in parts]
    for size in {part["world_size"] for part in parts}:
        missing = sorted(set(range(size)) - set(found))
        if missing or len(found) != size:
            raise ValueError(
                f"Rank {missing[0] if missing else size} is missing, or one came twice."
            )
    return parts


def cut(shards, shape, world_size):
    """The new shards of a tensor of which `shards` are the old ones, each with its own memory."""
    whole = torch.cat(shards)[: prod(shape)]
    size = -(-len(whole) // world_size)
    padded = torch.nn.functional.pad(whole, (0, size * world_size - len(whole)))
    return [shard.clone() for shard in padded.view(world_size, size)]


def resharded(parts, world_size, cut=cut):
    """A right answer for parts in order, with another `cut` perhaps."""
    first = parts[0]
    new = [
        {
            "rank": rank,
            "world_size": world_size,
            "shapes": deepcopy(first["shapes"]),
            "parameters": {},
            "optimizer": {name: {} for name in first["optimizer"]},
        }
        for rank in range(world_size)
    ]
    for name, shape in first["shapes"].items():
        if len(shape) < 2:
            pieces = [first["parameters"][name].clone() for _ in new]
        else:
            pieces = cut([part["parameters"][name] for part in parts], shape, world_size)
        for part, piece in zip(new, pieces, strict=True):
            part["parameters"][name] = piece
        for key, value in first["optimizer"].get(name, {}).items():
            if len(shape) < 2 or not torch.is_tensor(value) or value.dim() == 0:
                pieces = [deepcopy(value) for _ in new]
            else:
                pieces = cut([p["optimizer"][name][key] for p in parts], shape, world_size)
            for part, piece in zip(new, pieces, strict=True):
                part["optimizer"][name][key] = piece
    return new


def right(checkpoints, world_size):
    """A right answer, of which the wrong ones change a piece."""
    return resharded(in_order(checkpoints), world_size)


def takes_the_order_of_the_list(checkpoints, world_size):
    """Joins the parts as they lie in the list, not by their ranks."""
    in_order(checkpoints)
    return resharded(checkpoints, world_size)


def keeps_the_old_padding(checkpoints, world_size):
    """Joins the shards with the zeros at their end, and cuts these as if they were parameters."""

    def cut_all(shards, shape, world_size):
        return cut(shards, (len(torch.cat(shards)),), world_size)

    return resharded(in_order(checkpoints), world_size, cut_all)


def returns_views(checkpoints, world_size):
    """Returns slices of the whole vector: each keeps, and would save, all of its memory."""

    def views(shards, shape, world_size):
        whole = torch.cat(shards)[: prod(shape)]
        size = -(-len(whole) // world_size)
        padded = torch.nn.functional.pad(whole, (0, size * world_size - len(whole)))
        return list(padded.split(size))

    return resharded(in_order(checkpoints), world_size, views)


def joins_every_tensor_of_the_optimizer(checkpoints, world_size):
    """Takes whatever is a tensor for sharded, also Adam's `step`, which has no dimension."""
    parts = in_order(checkpoints)
    new = resharded([{**part, "optimizer": {}} for part in parts], world_size)
    for name, shape in parts[0]["shapes"].items():
        for key, value in parts[0]["optimizer"].get(name, {}).items():
            pieces = [value] * world_size
            if torch.is_tensor(value):
                pieces = cut([part["optimizer"][name][key] for part in parts], shape, world_size)
            for part, piece in zip(new, pieces, strict=True):
                part["optimizer"].setdefault(name, {})[key] = piece
    return new


def shards_the_vectors_too(checkpoints, world_size):
    """Treats every parameter as a sharded one: a vector is joined n times and cut down."""
    parts = in_order(checkpoints)
    new = resharded(parts, world_size)
    for name, shape in parts[0]["shapes"].items():
        pieces = cut([part["parameters"][name] for part in parts], shape, world_size)
        for part, piece in zip(new, pieces, strict=True):
            part["parameters"][name] = piece
    return new


def leaves_the_optimizer_as_it_was(checkpoints, world_size):
    """Reshards the parameters only; a new rank gets the optimizer state of an old one."""
    parts = in_order(checkpoints)
    new = resharded(parts, world_size)
    for part in new:
        part["optimizer"] = deepcopy(parts[part["rank"] % len(parts)]["optimizer"])
    return new


def counts_the_parts_only(checkpoints, world_size):
    """Compares the number of parts with the world size: one that came twice hides a missing one."""
    if not checkpoints or len(checkpoints) != checkpoints[0]["world_size"]:
        raise ValueError("A part is missing, perhaps that of rank 0.")
    return resharded(sorted(checkpoints, key=lambda part: part["rank"]), world_size)


def shares_out_with_chunk(checkpoints, world_size):
    """Cuts with `chunk`: no zeros at the end, and fewer pieces than ranks where few elements are."""

    def chunks(shards, shape, world_size):
        whole = torch.cat(shards)[: prod(shape)]
        return [piece.clone() for piece in whole.chunk(world_size)]

    return resharded(in_order(checkpoints), world_size, chunks)


ANSWERS = {
    "8.5": [
        takes_the_order_of_the_list,
        keeps_the_old_padding,
        returns_views,
        joins_every_tensor_of_the_optimizer,
        shards_the_vectors_too,
        leaves_the_optimizer_as_it_was,
        counts_the_parts_only,
        shares_out_with_chunk,
    ]
}
