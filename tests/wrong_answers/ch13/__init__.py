"""Plausible wrong answers, and other right ones, to the exercises of chapter 13.

The three worked submissions are FSDP2 (the chapter's own), shards by hand (`FlatShards`) and tensor
parallelism (`Columns`), each with a loop and a plan in a style of its own. Most wrong answers are one of
these, or the loop `_loop`, with one thing done wrongly.
"""
