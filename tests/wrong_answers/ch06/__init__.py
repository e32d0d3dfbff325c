"""Plausible wrong answers, and other right ones, to the exercises of chapter 06.

The wrong answers to 6.1, 6.2, 6.3 and 6.5 are right ones with one thing written wrongly.
"""
