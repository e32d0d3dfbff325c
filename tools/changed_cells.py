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

SOLVED, COPIES = "solutions", "notebooks"


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
    passage: list[IPyNbCell] = []  # the solved cells of the passage that is open
    closing = _closing(solved, cells)
    for item, cell in zip(solved, cells, strict=True):
        if not _differs(item.cell, cell):
            yield item
            continue
        yield CopysCell.from_parent(
            item.parent,
            name=f"{item.name} of the learner's copy",
            cell_num=item.cell_num,
            cell=cell,
            options=item.options,
        )
        passage.append(item)
        if item.cell_num in closing:
            yield from passage
            passage = []
    assert not passage


def _closing(solved: list[IPyNbCell], cells: list) -> set[int]:
    """The cells with which passages end."""
    pairs = [(i, c) for i, c in zip(solved, cells, strict=True) if _differs(i.cell, c)]
    kinds = [(item.cell_num, item.cell.source != cell.source) for item, cell in pairs]
    ends = {at for (at, asks), (_, next_asks) in pairwise(kinds) if next_asks and not asks}
    return ends | {at for at, _ in kinds[-1:]}


def _differs(one: nbformat.NotebookNode, other: nbformat.NotebookNode) -> bool:
    return (one.source, _outputs(one)) != (other.source, _outputs(other))


def _outputs(cell: nbformat.NotebookNode) -> list[dict]:
    return [{k: v for k, v in o.items() if k != "execution_count"} for o in cell.outputs]
