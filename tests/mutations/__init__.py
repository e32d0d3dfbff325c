"""Small mechanical changes of each solution, which its check must reject.

generate     the mutants of an answer
judging      each in a process of its own, which may crash, hang or eat memory
verdicts     what became of them, kept in build/ while neither answer nor check changes
equivalent   mutants that do the same as the solution, each with its proof
__main__     python -m tests.mutations 3.1 3.2

Mutants judge the checks, and a survivor is either killed, by a requirement that rejects it with the
mistake that fits, or proven to do the same for all that the docstring allows. "By time" are mutants
that did not end, which counts as killed.
"""
