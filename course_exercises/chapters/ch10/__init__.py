"""The checks of chapter 10: merging partial attention, the zig-zag, ring attention forward and with its
backward, heads for sequence with an all-to-all.

Functions whose first argument is `rank` run on real ranks and only report what they saw. The
requirements know the whole sequence, compute what each rank should have, and what it has after a
mistake: which keys a rank sees is a function of it and of the rank that the keys are from. Gradients of
keys are a table, by the rank of the queries and the rank of the keys, of which each mistake on the way
home adds other entries. That a hop is hidden is read off the order of calls, waits and products.

The chapter computes by pairs of chunks, two chunks a rank, so that one program serves both layouts and
the work that is counted is the work that is done. Bytes are those that leave a rank: a message as it
is, collectives by their factor.
"""
