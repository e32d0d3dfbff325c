"""The checks of chapter 08: the ledger of memory, an optimizer that shares its state out, the layout
of shards, FSDP, and checkpoints for any number of ranks.

Functions whose first argument is `rank` run on real ranks and only report what they saw; the
requirements, in the notebook's kernel, judge it.
"""
