"""The README's example of an explained failure is what `launch` prints under such a cell."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = """\
import sys
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell.instance(colors="NoColor").run_cell(sys.stdin.read())
"""


def test_the_readme_shows_what_launch_prints() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [cell], [shown] = (
        re.findall(rf"(?s)```{kind}\n(.*?)```", readme) for kind in ("python", "text")
    )
    command = [sys.executable, "-c", RUN]
    ran = subprocess.run(command, check=False, input=cell, capture_output=True, text=True)
    assert ran.stdout.strip() == shown.strip(), ran.stderr
