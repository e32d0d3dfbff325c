"""The checks of chapter 13: a training within a budget, a loop that loses nothing, and a plan.

`Training` is judged by what it does on real ranks: parameters, momentum and loss of one process, the
peak of its memory, its bytes. `train` gets a training that notes what it is handed, dies at a step
or in the middle of a save, and is started again. `plan` is judged by its regret.
"""
