"""The checks of chapter 06: linear layers cut in two ways, attention by heads, a cross-entropy over
a shared vocabulary, a norm on a part of the sequence, clipping by the global norm.

Functions whose first argument is `rank` run on real ranks and only report what they saw; the
requirements, in the notebook's kernel, judge it. Every rank gets the whole layer with the same
values, and so the kernel knows what each of them should hold and compute.

The chapter cuts modules in place with hooks, as `parallelize_module` does, so that parameters keep the
names of the whole model and one `part_of` gives every expected shard. What it shows of attention does not
pass here: 6.3 has fewer heads of keys than of queries. The loss of 6.4 is written nowhere else.
"""
