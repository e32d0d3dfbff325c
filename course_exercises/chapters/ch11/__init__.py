"""The checks of chapter 11: routing, places in the queues of all ranks, dispatch and combine, the balance
loss, the gradients on a grid of data and experts.

What several ranks find together is compared with a simulation in the notebook's kernel, which sees all
of them, rightly or with a slip of the kind that people make.
"""
