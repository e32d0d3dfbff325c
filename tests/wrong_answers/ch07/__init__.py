"""Plausible wrong answers, and other right ones, to the exercises of chapter 07.

The wrong answers to 7.3 and 7.4 are right ones with one thing written wrongly.
"""
