"""The checks of chapter 07: the groups of a grid, coordinates and back, a training step in two and in
three dimensions, the cheapest placement on two kinds of links.

A training step is compared with `_simulate`, which plays all ranks of a grid one after the other in
the notebook's kernel, rightly or with a slip of the kind that people make. What a rank reads, and to
whom it sends, is judged when it does it: such a mistake would otherwise end in a hang. The first
requirements use sizes at which no two slips give the same numbers.

A rank's place is `{dimension: its group}`; its coordinate is its rank in that group, and messages use
`group_src` and `group_dst`. The loss is divided by the tokens of the whole batch and gradients are
summed over data, so that any split of rows and any number of micro-batches adds up. Groups made in
different orders are shown, and no exercise checks for them: with gloo they can connect crosswise,
and which of two consequences is seen first differs from run to run.
"""
