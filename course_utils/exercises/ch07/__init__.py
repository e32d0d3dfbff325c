"""The checks of chapter 07: the groups of a grid, coordinates and back, a training step in two and in
three dimensions, the cheapest placement on two kinds of links.

A training step is compared with `_simulate`, which plays all ranks of a grid one after the other in
the notebook's kernel, rightly or with a slip of the kind that people make. What a rank reads, and to
whom it sends, is judged when it does it: such a mistake would otherwise end in a hang.
"""
