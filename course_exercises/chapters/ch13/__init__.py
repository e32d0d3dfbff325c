"""The checks of chapter 13: a training within a budget, a loop that loses nothing, and a plan.

`Training` is judged by what it does on real ranks: parameters, momentum and loss of one process, the
peak of its memory, its bytes. `train` gets a training that notes what it is handed, dies at a step
or in the middle of a save, and is started again, so that neither exercise needs the other. `plan` is
judged by its regret. The stage of the learner's script is held to the budget from its start to its end, with half of
the ranks killed in between.

The budget is on the peak, which rules out copies by any name; what is held after the step tells which
kind of copy it was. Widths are multiples of 12, so that tensor parallelism passes as well as shards.
"""
