"""The checks of chapter 04: three devices, the cut between two ranks, the best cut, a repaired
model, and a table of three strategies.

Places are checked without a GPU: PyTorch's meta device is a second device on every machine. A
tensor there has no content, so values are checked on the CPU and places on [cpu, meta].

Cuts are chosen from counted operations, which are the same everywhere; measured times stand only in
ignored cells and figures. What the chapter claims about time follows from the order of sends and
receives. A module that its stages are made of takes its optimizer from outside; the tied embedding is
repaired by a hook on the optimizer's step, so that the loops stay as they are.
"""
