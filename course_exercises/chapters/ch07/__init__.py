"""The checks of chapter 07: the groups of a grid, coordinates and back, a training step in two and in
three dimensions, the cheapest placement on two kinds of links.

A training step is compared with one process that has the whole model and the whole batch. What a rank reads,
and to whom it sends, is judged when it does it: such a mistake would otherwise end in a hang. What else is
wrong is read from the gradients that the ranks have stepped with: those of the last stages tell the output,
those before them whether gradients came back.

A rank's place is `{dimension: its coordinate}`; its coordinate is its rank in that group, and messages use
`group_src` and `group_dst`. The loss is a mean over blocks of rows of one size, so that the mean of the ranks'
gradients is that of the batch. Groups made in different orders are shown, and no exercise checks for them: with gloo
they can connect crosswise, and which of two consequences is seen first differs from run to run.
"""
