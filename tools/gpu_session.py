"""What to run when a machine with a GPU is lent for half an hour: one command that needs no network.

python tools/gpu_session.py carry FOLDER        before: download into FOLDER what such a machine lacks
python tools/gpu_session.py run --minutes 25    there: all steps, in the order of what is learnt
python tools/gpu_session.py run --only ranks-2 --only chapters

After every step it writes the report anew (report.md, and one log a step, in --out), and the row of
tests/gpu/README.md, so that a run that is cut off is still a result. Without a GPU it is a rehearsal:
the same steps on the CPU, and no row.
"""

import argparse
import contextlib
import datetime
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "tests" / "gpu" / "README.md"
HEADER = "| date | GPUs | driver, Python, PyTorch | commit | result |\n|---|---|---|---|---|\n"
WORKERS = str(max(2, (os.cpu_count() or 2) // 2))
PYTEST = [sys.executable, "-m", "pytest", "-v", "-n", WORKERS, "-o", "faulthandler_timeout=120"]
_WORD = "(PASSED|FAILED|ERROR|SKIPPED)"  # pytest -v, with xdist in front of the test, else behind
OUTCOME = re.compile(rf"^\[gw\d+\] \[ *\d+%\] {_WORD} (.+?) *$|^(\S+::.+?) {_WORD}\b", re.MULTILINE)
SHOWN = 5  # failures that the report names, of each step


@dataclass(frozen=True)
class Step:
    """A command, and the minutes that it may take."""

    name: str
    command: list[str]
    minutes: float


def _ranks(count: int) -> Step:
    return Step(f"ranks-{count}", [sys.executable, __file__, "ranks", str(count)], 1)


STEPS = [
    Step("versions", [sys.executable, __file__, "versions"], 1),
    *map(_ranks, (1, 2, 4, 8)),
    Step("chapters", [*PYTEST, "--nbval", "solutions", "--dist", "loadfile"], 10),
    Step("equality", [*PYTEST, "tests/chapters/test_equality.py"], 5),
    # an asynchronous call that nobody waits for goes wrong on a GPU only
    Step("waits", [*PYTEST, "tests/checks/test_wrong_answers.py", "-k", "not-waited"], 4),
    Step(
        "launch", [*PYTEST, "tests/launch/test_launch.py", "tests/launch/test_launch_hangs.py"], 5
    ),
    Step(
        "cluster",
        [*PYTEST, "tests/cluster/test_cluster.py", "tests/cluster/test_cluster_model.py"],
        4,
    ),
    Step("grader", [*PYTEST, "tests/grade/test_grade.py"], 4),
]


# --- run -----------------------------------------------------------------------------------------


@dataclass
class Result:
    """What a step came to: `counts` are of tests, `said` is what else its log tells."""

    name: str
    ended: str
    seconds: float
    counts: Counter
    said: list[str]

    def lines(self) -> list[str]:
        counts = ", ".join(f"{count} {word.lower()}" for word, count in self.counts.items())
        first = f"* **{self.name}**: {', '.join(filter(None, [self.ended, counts]))} ({self.seconds:.0f} s)"
        return [first, *(f"  * {line}" for line in self.said)]


class Report:
    """The report of one session, and its row in the table of all sessions."""

    def __init__(self, folder: Path, rows: Path, machine: dict[str, str]):
        self._folder, self._rows, self._machine = folder, rows, machine
        self._table = rows.read_text(encoding="utf-8")
        self.results: list[Result] = []

    def write(self) -> None:
        """Writes both anew; a rehearsal has no row."""
        lines = [f"# GPU session, {self._machine['date']}", ""]
        lines += [f"* {name}: {value}" for name, value in self._machine.items()] + [""]
        lines += [line for result in self.results for line in result.lines()]
        (self._folder / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        if self._machine["gpus"] != "none":
            table = self._table.replace(HEADER, HEADER + self._row())
            self._rows.write_text(table, encoding="utf-8")

    def _row(self) -> str:
        done = "; ".join(f"{r.name}: {_short(r)}" for r in self.results)
        m = self._machine
        versions = f"{m['driver']}, {m['python']}, {m['torch']}"
        return f"| {m['date']} | {m['gpus']} | {versions} | {m['commit']} | {done} |\n"


def _short(result: Result) -> str:
    passed, failed = result.counts["PASSED"], result.counts["FAILED"] + result.counts["ERROR"]
    tests = f"{passed} passed, {failed} failed" if passed or failed else ""
    ended = "" if result.ended == "ended with 0" else result.ended
    return ", ".join(filter(None, [ended, tests])) or "ok"


def run(steps: list[Step], minutes: float, folder: Path, rows: Path) -> list[Result]:
    """Runs the steps one after the other, until the time is up; those that are left are named."""
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(folder, rows, machine())
    end = time.monotonic() + 60 * minutes
    for step in steps:
        left = end - time.monotonic()
        if left < 5:
            result = Result(step.name, "not reached", 0.0, Counter(), [])
        else:
            print(f"=== {step.name}", flush=True)
            result = carry_out(step, min(left, 60 * step.minutes), folder / f"{step.name}.log")
        report.results.append(result)
        report.write()
        print("\n".join(result.lines()), flush=True)
    return report.results


def carry_out(step: Step, seconds: float, log: Path) -> Result:
    """Runs one step into its log, and reads there what came of it, also when it had to be ended."""
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            step.command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            ended = f"ended with {process.wait(timeout=seconds)}"
        except subprocess.TimeoutExpired:
            ended = f"cut off after {seconds:.0f} s"
            _cut_off(process)
    text = log.read_text(encoding="utf-8", errors="replace")
    outcomes = {a + d: b + c for b, a, d, c in OUTCOME.findall(text)}
    failed = [test for test, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    said = failed[:SHOWN] if outcomes else text.strip().splitlines()[-12:]
    return Result(step.name, ended, time.monotonic() - started, Counter(outcomes.values()), said)


def _cut_off(process: subprocess.Popen) -> None:
    """pytest says why tests have failed when it ends: so it is interrupted first."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# --- steps that are no tests ---------------------------------------------------------------------


def machine() -> dict[str, str]:
    """Date, GPUs, versions and commit, in words."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else "none"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpus": ", ".join(gpus) or "none",
        "driver": (_first_line(smi) or "unknown") if gpus else "none",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "nccl": nccl,
        "commit": _first_line(["git", "rev-parse", "--short", "HEAD"]) or "unknown",
    }


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return next(iter(done.stdout.split("\n")), None) if done.returncode == 0 else None


def versions() -> None:
    """Prints what there is, and what the doctor says of it."""
    from course_utils import hardware

    for name, value in machine().items():
        print(f"{name}: {value}")
    print(hardware.doctor())


def ranks(count: int) -> None:
    """Prints where `count` ranks run, and the seconds of a start and of a call."""
    from course_utils import hardware
    from course_utils.launch import launch

    placed = hardware.placement(count)
    print(f"{count} ranks: {placed.backend} on {', '.join(map(str, placed.devices))}")
    for number in ("first", "second"):
        started = time.perf_counter()
        seconds = launch(_calls, count, timeout=50)
        took = time.perf_counter() - started
        slowest = {size: max(of[size] for of in seconds) for size in seconds[0]}
        print(f"{number} launch: {took:.2f} s; all_reduce:", end=" ")
        print(", ".join(f"{size:,} bytes in {1e3 * s:.2f} ms" for size, s in slowest.items()))


def _calls(rank: int) -> dict[int, float]:
    """Seconds of an all-reduce, by its bytes: the mean of ten, after three."""
    import torch
    import torch.distributed as dist

    from course_utils import hardware

    seconds = {}
    for numbers in (256, 4 * 2**20):
        x = torch.ones(numbers, device=hardware.device())
        for call in range(13):
            if call == 3:
                x.sum().item()  # the host waits here
                started = time.perf_counter()
            dist.all_reduce(x)
            x /= dist.get_world_size()
        x.sum().item()
        seconds[x.nbytes] = (time.perf_counter() - started) / 10
    return seconds


# --- carry ---------------------------------------------------------------------------------------

LIMIT = 64 * 2**20  # bytes that travel to a lent machine
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28, 31, 34, 35)]
HEAVY = ("torch", "torchvision", "triton", "nvidia-", "cuda-", "numpy")  # such a machine has them


def carry(folder: Path, python: str) -> int:
    """Downloads the wheels of all that the course and its tests need, but for PyTorch and CUDA; says
    how to install them there, and whether they fit."""
    wanted = subprocess.run(
        [sys.executable, "-m", "pip", "freeze", "--exclude-editable"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    wanted = [w for w in wanted if "==" in w and not w.lower().startswith(HEAVY)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    command += [word for name in PLATFORMS for word in ("--platform", name)]
    missing = [w for w in wanted if subprocess.run([*command, w], check=False).returncode]
    files = sorted(folder.glob("*.whl"), key=lambda file: -file.stat().st_size)
    total = sum(file.stat().st_size for file in files)
    print(f"{len(files)} wheels, {total / 2**20:.1f} MiB in {folder}; the largest:")
    print(*(f"  {f.stat().st_size / 2**20:5.1f} MiB  {f.name}" for f in files[:8]), sep="\n")
    if missing:
        print("no wheel:", *missing)
    print(f"there: python3 -m pip install --no-index --no-deps --target /tmp/site {folder}/*.whl")
    print("       export PYTHONPATH=/tmp/site:$PWD and python3 tools/gpu_session.py run")
    if total > LIMIT:
        print(f"That is more than the {LIMIT // 2**20} MiB that travel: take the largest out.")
    return int(total > LIMIT)


def main(arguments: list[str]) -> int:
    """Entry point; `carry` exits with 1 if it is too much, `run` if a step did not end with 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    going = actions.add_parser("run", help="all steps, or those named")
    going.add_argument("--minutes", type=float, default=25)
    going.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    going.add_argument("--only", action="append", choices=[step.name for step in STEPS])
    carrying = actions.add_parser("carry", help="download what a machine without network lacks")
    carrying.add_argument("folder", type=Path)
    carrying.add_argument("--python", default="3.12")
    actions.add_parser("versions")
    actions.add_parser("ranks").add_argument("count", type=int)
    options = parser.parse_args(arguments)
    if options.action == "carry":
        return carry(options.folder, options.python)
    if options.action == "run":
        steps = [step for step in STEPS if not options.only or step.name in options.only]
        results = run(steps, options.minutes, options.out, ROWS)
        return int(any(result.ended != "ended with 0" for result in results))
    versions() if options.action == "versions" else ranks(options.count)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
