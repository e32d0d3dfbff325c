"""The checks of chapter 10."""

from course_utils.checks import Exercise

for i, (n, p) in enumerate(
    [
        ("merge", 2),
        ("zigzag_indices", 1),
        ("ring_attention", 3),
        ("RingAttention", 4),
        ("heads_for_sequence", 2),
    ],
    1,
):
    e = Exercise(f"10.{i}", n, points=p, hints=["a", "b", "c"], misconceptions={})

    @e.requires("x")
    def _(answer, draw):
        pass
