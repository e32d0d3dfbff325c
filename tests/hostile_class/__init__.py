"""A small class that hands in chapter 00, made by code, for the tests of the grader.

    members.py   who hands in what, and how to put the files into a folder
    damaged.py   files and notebooks that are not as they were given out
    attacks.py   code that does what no answer should
    forgeries.py code that wants marks for wrong answers
    insiders.py  code that reaches for what judges it, from within
    kills.py     code that is out to kill the grader, or to change what is not its own

The exercises are 0.1 average_over_ranks (1 point, ranks), 0.2 message_bytes (1 point, none) and
0.3 pass_on (2 points, ranks).
"""
