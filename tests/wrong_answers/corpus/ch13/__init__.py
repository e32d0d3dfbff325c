"""Rarer wrong answers to the exercises of chapter 13."""
