"""The checks of chapter 03: gradients averaged, a ring, the sampler, DDP that overlaps, evaluation.

Functions whose first argument is `rank` run on real ranks and only report what they saw; the
requirements, in the notebook's kernel, judge it. Gradients travel as {parameter name: tensor or
None}; a tied parameter has the name under which it was registered first.
"""
