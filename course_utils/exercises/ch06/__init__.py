"""The checks of chapter 06: linear layers cut in two ways, attention by heads, a cross-entropy over
a shared vocabulary, a norm on a part of the sequence, clipping by the global norm.

Functions whose first argument is `rank` run on real ranks and only report what they saw; the
requirements, in the notebook's kernel, judge it. Every rank gets the whole layer with the same
values, and so the kernel knows what each of them should hold and compute.
"""
