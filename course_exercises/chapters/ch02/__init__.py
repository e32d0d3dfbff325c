"""The checks of chapter 02: scatter, replicate, gather, the whole step, and six broken set-ups.

Two devices exist on every machine: the CPU, which may stand for several workers, and `meta`, whose
tensors have no values. On `meta` a check sees where a tensor lies, on the CPU what is in it.
"""
