"""The checks of chapter 12: the memory of a rank, what it sends, how long its step takes, and the search
for the best layout.

What an answer gives is compared with the same arithmetic, done rightly or with a slip of the kind that
people make: each slip is an argument of `_held`, `_sent` or `_seconds`.
"""
