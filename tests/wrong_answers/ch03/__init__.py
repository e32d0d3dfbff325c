"""Plausible wrong answers, and other right ones, to the exercises of chapter 03.

The wrong answers to 3.4 are the right one in `Bucketed` with one method written wrongly.
"""
