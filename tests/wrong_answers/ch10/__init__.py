"""Plausible wrong answers, and other right ones, to the exercises of chapter 10.

Most wrong answers to 10.3, 10.4 and 10.5 are right ones with one thing written wrongly.
"""
