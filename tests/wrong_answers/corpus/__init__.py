"""Rarer wrong answers, a file an exercise as beside this folder: each must be rejected, under any name."""
