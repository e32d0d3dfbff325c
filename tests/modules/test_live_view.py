"""What is shown of a launch while it goes on, and where: a terminal, or the cell of a notebook."""

import io
import itertools
import sys
from types import SimpleNamespace

import pytest

from course_utils.launch.ranks import cells, live
from course_utils.launch.ranks.output import LIMIT, Output
from course_utils.launch.story import calls
from course_utils.launch.story.matching import Meetings
from tests.support.pages import Page


class Terminal(io.StringIO):
    def isatty(self):
        return True


class FakeRank(SimpleNamespace):
    __hash__ = object.__hash__


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: self.now))


def ranks_of(number, folder):
    made = []
    for each in range(number):
        record = str(folder / f"calls-{each}")
        calls.prepare(record)
        rank = {"number": each, "record": record, "pid": 1, "joined": True, "finished": False}
        rank["output"] = Output(each, "", live=each == 0)
        made.append(FakeRank(calls_made=lambda: 0, **rank))
    return made


def on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    return sys.stdout


@pytest.mark.parametrize(
    ("written", "newest"),
    [
        (b"", ""),
        (b"one\ntwo\n", "two"),
        (b"one\n\n \n", "one"),
        (b"one\ntwo and ha", "two and ha"),
        (b"\r 10%|#   \r 20%|##  ", " 20%|##  "),
        (b"\r 10%|#   \r 20%|##  \r", " 20%|##  "),
        (b"\r 90%|### \r100%|####\n", "100%|####"),
        (b"a\nterminate called after throwing an instance of 'gloo::EnforceNotMet'\n", "a"),
        (LIMIT * b"long\n" + b"the end", "the end"),
    ],
)
def test_newest_line(written, newest):
    output = Output(1, "", live=False)
    output.add(written)
    assert output.newest == newest


def test_what_stays_of_rank_0_is_not_shown_twice(capsys):
    output = Output(0, "", live=True)
    output.add(b"one\n\r 10%|#   ")
    assert output.newest == " 10%|#   "
    output.add(b"\r100%|####\n")
    assert output.newest == ""
    assert capsys.readouterr().out.startswith("[rank 0] one\n")


def test_a_terminal_shows_one_row_that_goes_again(monkeypatch, tmp_path):
    terminal = on_a_terminal(monkeypatch)
    clock, ranks = Clock(monkeypatch), ranks_of(2, tmp_path)
    view = live.View(ranks, Meetings([rank.record for rank in ranks]))
    ranks[1].output.add(b"half \x1b[32mgreen\x1b[0m\n")
    clock.now += 0.2
    view.tick()
    ranks[0].output.add(b"first\n")
    assert terminal.getvalue() == "[rank 0] first\n"  # as short a launch as this is left alone
    clock.now += 0.2
    view.tick()
    assert "\x1b[K[rank 1] half green\x1b[?7h" in terminal.getvalue()
    clock.now += 3
    view.tick()
    shown = len(terminal.getvalue())
    assert "\x1b[K3 s · 2 of 2 ready  [rank 1] half green" in terminal.getvalue()
    ranks[0].output.add(b"a line\n")
    assert terminal.getvalue()[shown:] == "\x1b[K[rank 0] a line\n"
    clock.now += 1
    view.tick()
    assert terminal.getvalue().endswith("[rank 1] half green\x1b[?7h\x1b8")
    view.close()
    assert terminal.getvalue().endswith("\x1b8\x1b[K")


def test_where_nobody_watches_nothing_is_shown(capsys, monkeypatch, tmp_path):
    clock, ranks = Clock(monkeypatch), ranks_of(2, tmp_path)
    view = live.View(ranks, Meetings([rank.record for rank in ranks]))
    ranks[1].output.add(b"a line\n")
    clock.now += 10
    view.tick()
    view.close()
    assert capsys.readouterr().out == ""


def test_the_view_breaks_and_the_launch_goes_on(monkeypatch, tmp_path):
    on_a_terminal(monkeypatch)
    clock, ranks = Clock(monkeypatch), ranks_of(2, tmp_path)
    view = live.View(ranks, Meetings([rank.record for rank in ranks]))
    ranks[1].output = None
    clock.now += 10
    view.tick()
    view.close()


def test_the_count_says_what_ranks_that_stand_still_have_called(monkeypatch, tmp_path):
    terminal = on_a_terminal(monkeypatch)
    clock, ranks = Clock(monkeypatch), ranks_of(4, tmp_path)
    busy = iter(range(10))
    ranks[3].calls_made = lambda: next(busy)
    ranks[1].finished = True
    meetings = Meetings([rank.record for rank in ranks])
    last = dict.fromkeys(range(4))
    last[2] = SimpleNamespace(kind="barrier")  # in an earlier call of the same ranks
    monkeypatch.setattr(meetings, "newest", last.get)
    view = live.View(ranks, meetings)
    last[0] = last[3] = SimpleNamespace(kind="all_reduce")
    for _ in range(2):
        clock.now += 5
        view.tick()
    says = "10 s · 4 of 4 ready · rank 0 last called all_reduce · rank 1 finished\x1b"
    assert says in terminal.getvalue()


class Notebook:
    """A kernel whose messages go to a page, with one cell that runs."""

    def __init__(self, monkeypatch, watched=True):
        self.page, self.hooks = Page(), {"stdout": [], "stderr": [], "display": []}
        self.cell = 0
        self.metadata = {"deletedCells": []} if watched else {}
        self.stdout, self.stderr = self._stream("stdout"), self._stream("stderr")
        monkeypatch.setattr(sys, "stdout", self.stdout)
        monkeypatch.setattr(sys, "stderr", self.stderr)
        publisher = SimpleNamespace(register_hook=self.hooks["display"].append)
        shell = SimpleNamespace(
            kernel=None, get_parent=self._parent, display_pub=publisher, displayhook=None
        )
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
        monkeypatch.setattr(cells, "_known", [])
        cells.here()
        self.run_cell()

    def run_cell(self):
        self.cell += 1
        self.page.outputs.clear()

    def send(self, name, kind, content):
        message = {"msg_type": kind, "parent_header": self._parent()["header"], "content": content}
        for hook in self.hooks[name]:
            message = hook(message)
        self.page.take(kind, message["content"])

    def display(self):
        self.send("display", "display_data", {"data": {"text/plain": "a figure"}, "metadata": {}})

    def _parent(self):
        return {"header": {"msg_id": str(self.cell)}, "metadata": self.metadata}

    def _stream(self, name):
        class Stream(io.StringIO):
            pub_thread = SimpleNamespace(schedule=lambda function: function())
            session = SimpleNamespace(
                send=lambda _, kind, content, *__, **___: self.page.take(kind, content)
            )
            topic = b""
            register_hook = self.hooks[name].append

            def write(_, text):
                self.send(name, "stream", {"name": name, "text": text})

        return Stream()


# What a cell has put out before launch is called, and when a launch shows something below it.
BEFORE = {
    "nothing": ([], True),
    "lines": ([("stdout", "before\n")], True),
    "half a line": ([("stdout", "before ")], False),
    "an error": ([("stderr", "mind this\n")], False),
    "a figure": ([("display", None)], "if something will be printed"),
    "a figure and lines": ([("display", None), ("stdout", "before\n")], True),
}


PRINTED = ["", "by rank 0\n", "by a thread ", "a bar of a thread\r", "by a thread to stderr"]
CASES = set(itertools.product(BEFORE, PRINTED, ["", "a line\n"]))
# here an empty output stays, between the figure and what the thread writes
CASES.remove(("a figure", "by a thread to stderr", "a line\n"))


@pytest.mark.parametrize(("before", "printed", "of_rank_1"), sorted(CASES))
def test_a_cell_shows_what_goes_on_and_stores_none_of_it(
    monkeypatch, before, printed, of_rank_1, tmp_path
):
    outputs, shows = BEFORE[before]
    stored = []
    for watched in (False, True):
        clock, ranks = Clock(monkeypatch), ranks_of(2, tmp_path)
        notebook = Notebook(monkeypatch, watched)
        for name, text in outputs:
            notebook.display() if name == "display" else getattr(sys, name).write(text)
        view = live.View(ranks, Meetings([rank.record for rank in ranks]))
        ranks[1].output.add(of_rank_1.encode())
        for _ in range(2):
            clock.now += 4
            view.tick()
        expected = watched and (shows is True or bool(shows and of_rank_1))
        assert ("ready" in notebook.page.text()) is expected
        if printed.startswith("by rank"):
            ranks[0].output.add(printed.encode())
        elif printed:
            getattr(sys, "stderr" if "stderr" in printed else "stdout").write(printed)
        clock.now += 1
        view.tick()
        view.close()
        for rank in ranks:
            rank.output.finish()
        stored.append(notebook.page.outputs)
    assert stored[0] == stored[1]


def test_rows_stay_below_what_is_printed(monkeypatch, tmp_path):
    clock, ranks, notebook = Clock(monkeypatch), ranks_of(2, tmp_path), Notebook(monkeypatch)
    view = live.View(ranks, Meetings([rank.record for rank in ranks]))
    ranks[1].output.add(b"of rank 1 \xf0\x9f\x8e\x89\n")
    clock.now += 4
    view.tick()
    ranks[0].output.add(b"of rank 0\n")
    rows = notebook.page.text().replace(cells._NEXT_ROW, "|")
    assert rows == "[rank 0] of rank 0\n[rank 1] of rank 1|4 s · 2 of 2 ready"
    view.close()
    assert notebook.page.text() == "[rank 0] of rank 0\n"
