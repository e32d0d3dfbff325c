"""A cluster's login node, or Open OnDemand: PyTorch comes from a module, the rest into .venv."""

import os
import subprocess
from pathlib import Path

from test_colab import PLACE, PYTHON, call

ROOT = Path(__file__).parents[2]
COMMANDS = [
    "python3.12 -m venv --system-site-packages .venv",
    ".venv/bin/python -m pip install -e .",
]


def test_the_printed_commands_keep_the_modules_torch(tmp_path):
    module = PLACE / "module"  # what `module load` puts on PYTHONPATH
    if not module.exists():
        wanted = ("torch==2.11.0", "torchvision==0.26.0")
        call("uv", "pip", "install", "--python", PYTHON, "--target", module, *wanted)
    call("git", "clone", "--quiet", ROOT, tmp_path / "course")
    loaded = os.environ | {"PYTHONPATH": str(module)}
    for command in COMMANDS:
        assert command in (ROOT / "docs" / "open.md").read_text(encoding="utf-8")
        call(*command.split(), cwd=tmp_path / "course", env=loaded)
    run = "import torch; from course_utils.launch import launch; print(launch(abs, 2), torch.__file__)"
    python = tmp_path / "course" / ".venv" / "bin" / "python"
    printed = subprocess.check_output([python, "-c", run], env=loaded, text=True)
    assert printed.strip() == f"[0, 1] {module / 'torch' / '__init__.py'}"
