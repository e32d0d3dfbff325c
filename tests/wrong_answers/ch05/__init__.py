"""Plausible wrong answers, and other right ones, to the exercises of chapter 05."""
