"""Mutants that do the same as the solution, so that no check can reject them, each with its proof.

    EQUIVALENT = {
        "3.1": {
            ("the line", "the line of the mutant"): "why both do the same",
        },
    }

The two lines are as `python -m tests.mutations` prints them. When the solution changes, its line
here fits nothing any more: the run says so and fails.
"""

EQUIVALENT: dict[str, dict[tuple[str, str], str]] = {
    "2.1": {
        (
            "count = min(len(devices), len(batch))",
            "count = min(len(batch), len(devices))",
        ): "The smaller of two numbers is the same in either order.",
    },
    "8.1": {
        (
            "return sum(count * size for count, size in zip(held, sizes))",
            "return sum(count * size for count, size in zip(sizes, held))",
        ): "A product does not care which factor is named first.",
    },
}
