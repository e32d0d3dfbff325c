"""Makes the course's environment in .venv, and reuses it while what it needs is unchanged.

    python tools/setup_env.py                   what a learner needs
    python tools/setup_env.py --extra dev       also what authors and tests need
    python tools/setup_env.py --python NAME     with this Python, and no other
    python tools/setup_env.py --oldest          in .venv-oldest: the lowest versions that will do
    python tools/setup_env.py --torch cuda      PyTorch with CUDA's libraries, also without a driver
    python tools/setup_env.py --installer pip   with pip, also where uv is

This file runs under any Python from 2.7 on, so that a Python too old can be told in words. It
needs nothing but the standard library. Whatever goes wrong ends in one sentence.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys

try:
    from urllib.request import urlopen
except ImportError:  # Python 2
    from urllib2 import urlopen

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# PyTorch without CUDA's libraries, a fifth of the size (pytorch.org, Get Started, CPU)
# torch and torchvision both come from there: one from each index does not work
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
DRIVER = "/proc/driver/nvidia/version"
SUPPORTED = ["3.13", "3.12", "3.11"]  # the newest that is found is taken
WINDOWS = os.name == "nt"
PROBE_PYTHON = "import sys; print('%d.%d' % sys.version_info[:2]); import venv, ensurepip"
PROBE_PACKAGES = """
import importlib.util as util, os, sys
def place(name):
    spec = util.find_spec(name)
    return os.path.dirname(os.path.realpath(spec.origin)) if spec and spec.origin else None
needed = ["pip", "torch", "torchvision", "jupyterlab", "nbval", "matplotlib", "ipywidgets"]
here = os.path.realpath(os.path.join(sys.argv[1], "course_utils"))
print("complete" if all(map(place, needed)) and place("course_utils") == here else "incomplete")
"""
# what pip and venv write when this went wrong; the first that is found explains the failure
CAUSES = [
    (
        r"No space left on device|Errno 28|Disk quota exceeded|not enough space",
        (
            "The disk is full: the course needs about {size} free in {root}, and pip about 4 GB in "
            "the folder for temporary files (TMPDIR); make room and run the command again."
        ),
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLError",
        (
            "The package index's certificate is not trusted here: point PIP_CERT to your "
            "organisation's certificate bundle and run the command again."
        ),
    ),
    (
        (
            r"NewConnectionError|ConnectTimeout|ReadTimeout|Read timed out|ProxyError|name resolution"
            r"|Connection refused|Connection reset|Connection broken|Network is unreachable"
            r"|nodename nor servname|getaddrinfo|IncompleteRead|ProtocolError|Max retries exceeded"
        ),
        (
            "The Python package index cannot be reached: the first run needs the network (behind a "
            "proxy, set HTTPS_PROXY); check it and run the command again, what was downloaded is kept."
        ),
    ),
    (
        r"Permission denied|Read-only file system|Access is denied",
        (
            "{root} cannot be written: make the folder writable or clone the course elsewhere, "
            "and run the command again."
        ),
    ),
    (
        r"No matching distribution found for (\S+)",
        (
            "There is no {0} for this computer on the package index: the course needs 64-bit Linux, "
            "macOS on Apple silicon, or WSL on Windows, with Python 3.11 to 3.13."
        ),
    ),
]


class SetupError(Exception):
    """One sentence: what happened, and what to do."""


def find_python(requested):
    """Path of the Python to use: `requested`, or the newest supported one that is found."""
    names = [requested] if requested else ["python" + v for v in SUPPORTED]
    names += [] if requested else ["python3", "python", sys.executable]
    found = [(name, probe_python(name)) for name in names]
    for name, (version, has_venv) in found:
        if version in SUPPORTED and has_venv:
            return name
    for name, (version, _) in found:
        if version in SUPPORTED:
            raise SetupError(
                "Python %s is here (%s), but it has no venv module: install it (on Debian and "
                "Ubuntu: apt install python%s-venv) and run the command again."
                % (version, name, version)
            )
    here = ["%s is Python %s" % (name, version) for name, (version, _) in found if version]
    raise SetupError(
        "The course needs Python 3.11, 3.12 or 3.13, and %s: install one of these from "
        "https://www.python.org/downloads/ (or name one: make lab PYTHON=/path/to/python3.12)."
        % (here[0] if here else "there is no %s here" % (requested or "Python"))
    )


def probe_python(name):
    """(version, has venv) of a Python; (None, False) if there is no such Python."""
    status, output, _ = call([name, "-c", PROBE_PYTHON])
    version = output.split()[0] if re.match(r"\d+\.\d+\s", output) else None
    return version, status == 0


def call(command):
    """Run `command` quietly; return its exit status and what it wrote to stdout and stderr."""
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True
        )
    except (OSError, ValueError) as error:
        return 127, "", str(error)
    output, errors = process.communicate()
    return process.returncode, output, errors


def has_driver():
    """Whether there is an NVIDIA driver; under WSL it is Windows's, and /proc does not tell."""
    return os.path.exists(DRIVER) or call(["nvidia-smi", "-L"])[0] == 0


def fingerprint(root):
    """Digest of the files that say what the environment holds."""
    digest = hashlib.sha256()
    for name in ("requirements.txt", "pyproject.toml"):
        with open(os.path.join(root, name), "rb") as stream:
            digest.update(stream.read())
    return digest.hexdigest()


def listed(root):
    """The learner's packages with their ranges, as pyproject.toml lists them."""
    with open(os.path.join(root, "pyproject.toml")) as stream:
        found = re.search(r"^dependencies = \[(.*?)^\]", stream.read(), re.MULTILINE | re.DOTALL)
    return re.findall(r'"(.*?)"', found.group(1)) if found else []


def lowest(root):
    """The lower ends of these ranges, as pip's constraints."""
    ranges = [re.match(r"([\w-]+)>=([\w.]+)", each) for each in listed(root)]
    return ["%s==%s" % each.groups() for each in ranges if each]


def cpu_index(torch):
    """Where PyTorch without CUDA is to come from; None if it is the one with CUDA that is wanted.

    torch: "cpu", "cuda", or "auto": without CUDA on a Linux machine that has no NVIDIA driver, if
    the index answers at once (on other systems the usual build has no CUDA anyway).
    """
    if torch == "cuda" or torch == "auto" and (sys.platform != "linux" or has_driver()):
        return None
    try:
        urlopen(CPU_INDEX + "/torch/", timeout=3).close()
    except Exception:  # noqa: BLE001 - no network, a proxy, a certificate: whatever stands between
        say("PyTorch's index of CPU builds does not answer: taking the build with CUDA.")
        return None
    say("Taking PyTorch without CUDA's libraries (--torch cuda takes them as well).")
    return CPU_INDEX


class Environment(object):
    """The virtual environment in .venv, or with `oldest` the one in .venv-oldest."""

    def __init__(self, root, oldest=False, installer="auto"):
        self.root = root
        self.installer = installer  # "pip", or "auto" until one of the two has installed something
        self.oldest = oldest
        self.folder = os.path.join(root, ".venv-oldest" if oldest else ".venv")
        self.python = os.path.join(
            self.folder, *(["Scripts", "python.exe"] if WINDOWS else ["bin", "python"])
        )
        self.stamp = os.path.join(self.folder, "course.json")

    def installed(self):
        """What the last finished installation recorded: its needs and its extras."""
        try:
            with open(self.stamp) as stream:
                stamp = json.load(stream)
            return stamp["needs"], set(stamp["extras"])
        except (OSError, IOError, ValueError, KeyError, TypeError):
            return None, set()

    def is_current(self, extras):
        """True if nothing needs to be done: same requirements, nothing lost since."""
        needs, installed = self.installed()
        return needs == fingerprint(self.root) and set(extras) <= installed and self.is_complete()

    def is_complete(self):
        """True if the packages are there and course_utils is this folder's (not a moved clone's)."""
        output = call([self.python, "-c", PROBE_PACKAGES, self.root])[1]
        return output.strip() == "complete"

    def check(self, requested):
        """Raise SetupError if there is a .venv that cannot be used."""
        if not os.path.lexists(self.folder):
            return
        status, output, _ = call([self.python, "-c", PROBE_PYTHON])
        version = output.strip()
        if status != 0 or version not in SUPPORTED:
            reason = "it is for Python %s" % version if version else "its Python does not start"
            raise SetupError(
                "The environment in %s is broken (%s): delete that folder and run "
                "the command again." % (self.folder, reason)
            )
        if requested and probe_python(find_python(requested))[0] != version:
            raise SetupError(
                "The environment in %s is for Python %s: delete that folder to have it made "
                "with %s." % (self.folder, version, requested)
            )

    def create(self, python):
        """Make the environment, or complete one whose making was interrupted."""
        if call([self.python, "-m", "pip", "--version"])[0] == 0:
            return
        say("Making the environment in %s with %s ..." % (os.path.basename(self.folder), python))
        # two steps, because venv keeps to itself what stopped ensurepip
        steps = (
            [python, "-m", "venv", "--without-pip", self.folder],
            [self.python, "-m", "ensurepip"],
        )
        for step in steps:
            status, output, errors = call(step)
            if status != 0:
                text = explain(output + errors, self.root, "The environment was not made")
                raise SetupError(text)

    def install(self, extras, index):
        """Install what is needed, with the installer's own progress on the screen; with `index`,
        torch and torchvision from there: one without the other would not fit."""
        size = "1.5" if index else "6"
        say("Installing the course's packages: this takes minutes, once, and %s GB of disk." % size)
        extras = sorted(self.installed()[1].union(extras))
        target = ".[%s]" % ",".join(extras) if extras else "."
        constraints = self.constraints()
        if index:
            pair = [each for each in listed(self.root) if each.startswith("torch")]
            self.install_packages(pair + constraints + ["--index-url", index])
        self.install_packages(["-e", target] + constraints)
        if not self.is_complete():
            raise SetupError(
                "The environment in %s is broken (packages are missing although pip has "
                "installed them): delete that folder and run the command again." % self.folder
            )
        with open(self.stamp, "w") as stream:
            stamp = {"needs": fingerprint(self.root), "extras": extras, "installer": self.installer}
            json.dump(stamp, stream)

    def constraints(self):
        """What holds the oldest environment to the lowest versions; nothing for the usual one."""
        if not self.oldest:
            return []
        path = os.path.join(self.folder, "lowest.txt")
        with open(path, "w") as stream:
            stream.write("\n".join(lowest(self.root)) + "\n")
        return ["-c", path]

    def install_packages(self, wanted):
        """Install with uv, else with pip; raise SetupError where pip cannot either.

        pip's own configuration (an index, a proxy) is not uv's: that uv fails is no reason to stop.
        """
        if self.installer != "pip" and self.install_with_uv(wanted):
            self.installer = "uv"
        else:
            self.installer = "pip"
            self.install_with_pip(wanted)

    def install_with_uv(self, wanted):
        """Install with uv where it is (docs.astral.sh/uv): seconds where pip takes minutes."""
        if call(["uv", "--version"])[0] != 0:
            return False
        command = ["uv", "pip", "install", "--python", self.python]
        if subprocess.call(command + wanted, cwd=self.root) == 0:
            return True
        say("uv could not install the packages; pip tries it now.")
        return False

    def install_with_pip(self, wanted):
        """Install with pip, or raise SetupError with the reason."""
        command = [self.python, "-m", "pip", "install", "--disable-pip-version-check"]
        process = subprocess.Popen(
            command + ["--retries", "2"] + wanted,
            cwd=self.root,
            stderr=subprocess.PIPE,
            universal_newlines=True,
        )
        errors = process.communicate()[1]
        if process.returncode != 0:
            raise SetupError(explain(errors, self.root, "pip could not install the packages"))


def explain(errors, root, otherwise):
    """The sentence for what pip or venv wrote when it failed; that text itself if unknown."""
    for pattern, sentence in CAUSES:
        found = re.search(pattern, errors)
        if found:
            return sentence.format(*found.groups(), root=root, size="8 GB")
    return (
        "%s\n%s, for the reason above: run the command again; if it fails in the same way, "
        "delete .venv first." % (errors.strip(), otherwise)
    )


def say(text):
    """Print at once, also into a pipe."""
    print(text)
    sys.stdout.flush()


def set_up(root, requested, extras, oldest=False, torch="cuda", installer="auto"):
    """Leave a working environment in `root`, or raise SetupError."""
    environment = Environment(root, oldest, installer)
    environment.check(requested)
    if environment.is_current(extras):
        return
    environment.create(find_python(requested))
    environment.install(extras, cpu_index(torch))
    say("The environment is ready.")


def main():
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml")
    parser.add_argument("--python", default="", help="the Python to make .venv with")
    parser.add_argument("--oldest", action="store_true", help="the lowest versions, apart")
    parser.add_argument(
        "--torch",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="with CUDA's libraries or without; auto: without where there is no NVIDIA driver",
    )
    parser.add_argument(
        "--installer",
        choices=["auto", "pip"],
        default="auto",
        help="auto: uv where it is, else pip",
    )
    options = parser.parse_args()
    try:
        set_up(
            ROOT, options.python, options.extra, options.oldest, options.torch, options.installer
        )
    except SetupError as error:
        sys.stderr.write("\n%s\n" % error)
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted: run the same command again, it continues.\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
