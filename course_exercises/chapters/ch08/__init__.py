"""The checks of chapter 08: the ledger of memory, an optimizer that shares its state out, the layout
of shards, FSDP, and checkpoints for any number of ranks.

Functions whose first argument is `rank` run on real ranks and only report what they saw; the
requirements, in the notebook's kernel, judge it.

Bytes held are counted by storages, because a parameter whose memory was freed keeps its shape. MiniFSDP
shards each parameter by itself, flat and padded, under its old name; a layer is a module with
parameters of its own that only its own `forward` uses, so `nn.MultiheadAttention` does not fit, and
all ranks call the same layers in the same order, as with `fully_shard`. ShardedOptimizer shares out
whole parameters, with one inner optimizer for each group; its `state` is the rank's part. A part of a
checkpoint carries `rank`, `world_size` and `shapes`, so that an incomplete one is refused with the
number of the missing rank. Momentum SGD is used wherever equality is asked; Adam appears in ledgers
only.
"""
