# @title Run this cell first: on Colab and Kaggle it fetches the course, elsewhere it does nothing
def fetch_the_course(address):
    """Clones and installs the course, unless it is here already; PyTorch stays as it is."""
    import importlib.util
    import os
    import subprocess
    import sys
    from pathlib import Path

    def run(*command):
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"The course was not fetched from {address}. On Kaggle, switch on Internet in the "
                f"notebook's settings, then run this cell again.\n{done.stderr.strip()[-500:]}"
            )

    def missing(name):
        return importlib.util.find_spec(name) is None

    needed = ("cloudpickle", "ipywidgets", "matplotlib", "numpy", "platformdirs", "psutil")
    if missing("course_utils"):
        folder = Path("course").resolve()
        if not folder.exists():
            run("git", "clone", "--quiet", "--depth", "1", address, str(folder))
        packages = ["--editable", str(folder), *filter(missing, needed)]
        run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *packages)
        importlib.invalidate_caches()
        sys.path.insert(0, str(folder))  # this kernel has read its path files already
    os.chdir(Path(importlib.util.find_spec("course_utils").origin).parents[1] / "notebooks")


if __import__("os").environ.keys() & {"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"}:
    fetch_the_course("ADDRESS")
