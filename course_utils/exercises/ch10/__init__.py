"""The checks of chapter 10: merging partial attention, the zig-zag, ring attention forward and with its
backward, heads for sequence with an all-to-all.

Functions whose first argument is `rank` run on real ranks and only report what they saw. The
requirements know the whole sequence, compute what each rank should have, and what it has after a
mistake: `_Slip` says what a mistaken rank believes.
"""
