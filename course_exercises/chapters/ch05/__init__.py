"""The checks of chapter 05: the bubble, three schedules, micro-batch gradients, an exchange.

A schedule is judged in this order: its form, then whether it can run (the sentence is the legality
checker's), then its time, then its memory. Which mistake a bad schedule has is read from the
schedule itself, such as from the number of forward passes before the first backward pass, and it is
told by how much it misses a budget. Micro-batches of interleaved 1F1B are a multiple of the stages.

A message that nobody waited for is found by following the Work objects, never by looking at a tensor
that may have arrived.
"""
