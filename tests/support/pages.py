"""The output of a notebook's cell, as JupyterLab 4 keeps it when messages of the kernel arrive."""


class Page:
    """outputs: what would be stored of the cell."""

    def __init__(self):
        self.outputs = []
        self._clear_next = False
        self._cursor = 0  # in the last output's text

    def take(self, kind: str, content: dict) -> None:
        """Does what the page does with a message."""
        if kind == "clear_output":
            self._clear_next = content["wait"]
            if not content["wait"]:
                self.outputs.clear()
        elif kind in ("stream", "display_data", "execute_result", "error"):
            if self._clear_next:
                self.outputs.clear()
                self._clear_next = False
            self._add(kind, content)

    def text(self) -> str:
        """All text of its streams."""
        return "".join(each["text"] for each in self.outputs if each["kind"] == "stream")

    def _add(self, kind, content):
        if kind != "stream":
            self.outputs.append({"kind": kind, **content})
            return
        last = self.outputs[-1] if self.outputs else {}
        if last.get("name") != content["name"]:
            last = {"kind": kind, "name": content["name"], "text": ""}
            self.outputs.append(last)
            self._cursor = 0
        text, at = last["text"], self._cursor
        for character in content["text"]:
            start = text.rfind("\n", 0, at) + 1
            if character == "\r":
                at = start
            elif character == "\b":
                text, at = (text[: at - 1] + text[at + 1 :], at - 1) if at > start else (text, at)
            elif character == "\n":
                text, at = text + "\n", len(text) + 1
            else:
                text, at = text[:at] + character + text[at + 1 :], at + 1
        last["text"], self._cursor = text, at
