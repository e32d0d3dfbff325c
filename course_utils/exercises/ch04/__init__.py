"""The checks of chapter 04: three devices, the cut between two ranks, the best cut, a repaired
model, and a table of three strategies.

Places are checked without a GPU: PyTorch's meta device is a second device on every machine. A
tensor there has no content, so values are checked on the CPU and places on [cpu, meta].
"""
