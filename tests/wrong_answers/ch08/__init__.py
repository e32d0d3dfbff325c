"""Plausible wrong answers, and other right ones, to the exercises of chapter 08.

The wrong answers to 8.2, 8.3 and 8.4 are right ones with one thing written wrongly.
"""
