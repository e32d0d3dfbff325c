"""Plausible wrong answers, and other right ones, to the exercises of chapter 12.

Most wrong answers are the arithmetic of `_memory`, `_traffic`, `_time` or `_search` with one thing written
wrongly.
"""
