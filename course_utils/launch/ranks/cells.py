"""The end of a notebook cell's output: rows there, of which nothing is left when they are taken away.

JupyterLab takes back a character of a stream's text for each backspace, as far as the start of its
line, and stores what is left. So the rows are one line, the last one of the cell's standard output.
Hooks where ipykernel sends its messages keep it the last, whoever puts out something.
"""

import contextlib
import sys
import threading

# Spaces at the end of a row hang over its edge, however many they are: the next word begins a row.
_NEXT_ROW = 400 * " "

# What a cell has put out last.
_WHOLE_LINES, _FIGURE, _OTHER = range(3)


class _Cells:
    """What each cell has put out last, and what one of them shows. Only ipykernel's thread for
    messages reads and changes that, and so in the order of the messages."""

    def __init__(self, shell):
        self._shell, self._out = shell, sys.stdout
        self._shown, self._request = "", shell.get_parent()
        self._last = {_id(self._request["header"]): _OTHER}  # it may have been anything
        self._do(sys.stdout.register_hook, self._on_text)
        self._do(sys.stderr.register_hook, self._on_other)
        for publisher in (shell.display_pub, shell.displayhook):
            if hasattr(publisher, "register_hook"):  # not every displayhook has it
                publisher.register_hook(self._on_display)

    def watched(self) -> bool:
        """Whether the cell that runs is one in JupyterLab, whose requests tell of deleted cells. What
        executes a notebook without a page stores backspaces; what other pages store is not known."""
        here = sys.stdout is self._out and threading.current_thread() is threading.main_thread()
        return here and "deletedCells" in self._shell.get_parent()["metadata"]

    def show(self, lines: list[str], count: str) -> None:
        """Shows a row for each line, and one for `count`, instead of what is shown."""
        text = _NEXT_ROW.join(filter(None, [*lines, count]))
        self._do(self._replace, self._shell.get_parent(), text, bool(lines))

    def hide(self) -> None:
        self._do(self._erase)

    def _do(self, function, *args):
        self._out.pub_thread.schedule(lambda: function(*args))

    def _replace(self, request, text, more_comes):
        last = self._last.get(_id(request["header"]))
        if last == _OTHER or (last == _FIGURE and not more_comes):
            return  # an output of its own would stay, empty, when its text has gone
        if not text:
            self._erase()
        elif text != self._shown:
            self._request = request
            self._send("stream", {"name": "stdout", "text": self._back() + text})
            self._shown = text

    def _erase(self):
        if self._shown and _id(self._request["header"]) not in self._last:
            self._send("clear_output", {"wait": False})  # the cell has put out nothing else
        elif self._shown:
            self._send("stream", {"name": "stdout", "text": self._back()})
        self._shown = ""

    def _back(self):
        return len(self._shown) * "\b"

    def _send(self, kind, content):
        self._out.session.send(
            self._out.pub_thread, kind, content, self._request, ident=self._out.topic
        )

    def _on_text(self, message):
        text, cell = message["content"]["text"], _id(message["parent_header"])
        self._last[cell] = _WHOLE_LINES if text.endswith("\n") else _OTHER
        if self._shown and cell == _id(self._request["header"]):
            back, self._shown = self._back(), self._shown if text.endswith("\n") else ""
            message["content"]["text"] = back + text + self._shown
        return message

    def _on_display(self, message):
        if message["msg_type"] != "update_display_data":
            self._do(self._on_other, message)  # before the message, which goes the same way
        return message

    def _on_other(self, message):
        cell = _id(message["parent_header"])
        if cell == _id(self._request["header"]):
            self._erase()
        self._last[cell] = _FIGURE if message["msg_type"] == "display_data" else _OTHER
        if message["msg_type"] == "clear_output" and not message["content"]["wait"]:
            del self._last[cell]
        return message


def _id(header):
    return header.get("msg_id")


_known = []


def here() -> _Cells | None:
    """Where the cell that runs can show something; None where nobody sees it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if not _known and hasattr(shell, "kernel") and hasattr(sys.stdout, "pub_thread"):
        _known.append(_Cells(shell))
    return _known[0] if _known and _known[0].watched() else None


with contextlib.suppress(Exception):
    here()  # from now on it is known what cells put out
