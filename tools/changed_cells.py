"""The cells of a learner's copy that differ from the solved notebook's, run beside these in one kernel.

A stub and its check, a guess left open and its table: each such passage runs as the learner has it, then
as it is solved. All other cells have the same text and the same stored outputs in both copies, so once is
enough. A passage goes from a cell with another text to the last one with another output, before the
next cell with another text.
"""

import os
from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from pathlib import Path

import nbformat
from nbval.plugin import IPyNbCell

COPIES = "notebooks"  # the folder beside that of the solved ones


class CopysCell(IPyNbCell):
    """A cell with a progress file of its own; the learner's script is the one beside the copy."""

    def runtest(self) -> None:
        home, progress = self.path.parent, Path(os.environ["COURSE_PROGRESS"])
        there = home.with_name(COPIES) if "mine." in self.cell.source else home
        self._go(there, progress.with_stem(f"{COPIES}-{self.path.stem}"))
        try:
            super().runtest()
        finally:
            self._go(home, progress)

    def _go(self, folder: Path, progress: Path) -> None:
        """Has the kernel go to a folder, without binding a name in it."""
        kernel, os_ = self.parent.kernel, "__import__('os')"
        setting = f"{os_}.environ['COURSE_PROGRESS'] = {str(progress)!r}"
        sent = kernel.execute_cell_input(f"{os_}.chdir({str(folder)!r}); {setting}")
        kernel.await_reply(sent, timeout=60)


def with_copies(items: Iterable) -> list:
    """`items` of pytest, and among a solved notebook's cells those that its copy changes."""
    return [
        item
        for path, group in groupby(items, key=lambda item: item.path)
        for item in (_both(list(group)) if path.suffix == ".ipynb" else group)
    ]


def _both(solved: list[IPyNbCell]) -> Iterator[IPyNbCell]:
    path = solved[0].path
    copy = nbformat.read(path.parent.with_name(COPIES) / path.name, as_version=4)
    cells = [cell for cell in copy.cells if cell.cell_type == "code"]
    pairs = zip(solved, cells, strict=True)
    changed = {item: cell for item, cell in pairs if _differs(item.cell, cell)}
    closing = _closing(changed)
    passage: list[IPyNbCell] = []  # the solved cells of the passage that is open
    for item in solved:
        if item not in changed:
            yield item
            continue
        yield CopysCell.from_parent(
            item.parent,
            name=f"{item.name} of the learner's copy",
            cell_num=item.cell_num,
            cell=changed[item],
            options=item.options,
        )
        passage.append(item)
        if item in closing:
            yield from passage
            passage = []


def _closing(changed: dict[IPyNbCell, nbformat.NotebookNode]) -> set[IPyNbCell]:
    """The cells with which passages end, of those that the copy changes."""
    asking = [(item, item.cell.source != cell.source) for item, cell in changed.items()]
    ends = {item for (item, asks), (_, next_asks) in pairwise(asking) if next_asks and not asks}
    return {*ends, *list(changed)[-1:]}


def _differs(one: nbformat.NotebookNode, other: nbformat.NotebookNode) -> bool:
    return (one.source, _outputs(one)) != (other.source, _outputs(other))


def _outputs(cell: nbformat.NotebookNode) -> list[dict]:
    return [{k: v for k, v in o.items() if k != "execution_count"} for o in cell.outputs]
