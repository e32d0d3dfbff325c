"""Every figure that more than one chapter draws, in one style.

The style is applied on import. Colours mean the same everywhere. Saturated colours (Okabe and Ito's
palette) say *what*: a phase of training and the memory it leaves share one colour, so activations
look like the forward pass that made them, gradients like the backward pass, the optimizer's state
like the update. Pale colours (Tol's light palette) say *who*: the rank that data belongs to. Both
palettes are safe for colour-blind readers, and no figure says anything by colour alone. Lines that are
no kind of thing are ink and grey, in dashes of their own; what there is room for is ink and dashed.

Every function returns its Figure (the drawing kit draws on axes that `canvas` gives). The last line
of a cell is `plt.show()`.
"""

from course_utils.plots.amounts import human_bytes, loss_curves, memory
from course_utils.plots.collectives import before_and_after, ring_step
from course_utils.plots.kit import (
    arrow,
    blueprint,
    building,
    canvas,
    pile,
    ring,
    star,
    truck,
)
from course_utils.plots.pipelines import gantt, gantt_lanes
from course_utils.plots.style import (
    COLORS,
    LIMIT,
    LINES,
    NEUTRALS,
    RANK_COLORS,
    WIDTH,
    legend,
    look_of,
)
from course_utils.plots.timelines import lanes, timeline, timelines

__all__ = [
    "COLORS",
    "LIMIT",
    "LINES",
    "NEUTRALS",
    "RANK_COLORS",
    "WIDTH",
    "arrow",
    "before_and_after",
    "blueprint",
    "building",
    "canvas",
    "gantt",
    "gantt_lanes",
    "human_bytes",
    "lanes",
    "legend",
    "look_of",
    "loss_curves",
    "memory",
    "pile",
    "ring",
    "ring_step",
    "star",
    "timeline",
    "timelines",
    "truck",
]
