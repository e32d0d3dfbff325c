"""The checks of chapter 05: the bubble, three schedules, micro-batch gradients, an exchange.

A schedule is judged in this order: its form, then whether it can run (the sentence is the legality
checker's), then its time, then its memory. Which mistake a bad schedule has is read from the
schedule itself, such as from the number of forward passes before the first backward pass.
"""
