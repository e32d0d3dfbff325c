"""python -m course_utils plan, and trace PROGRAM: what may be asked. The answers are in `planning` and `tracing`."""

import argparse
import sys
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from course_planner.catalogue import gpus, models
from course_utils.lesson.files import must_be_writable

_EXAMPLE = Path(__file__).with_name("example.py")
_TRACE = """\
Runs two steps of your training program as one rank of as many as you like, and says what the second
one sends, computes and holds. Nothing is computed and nothing is sent, so a laptop is enough. Of several
ranks it says whether their calls match.

PROGRAM is a Python file with a function program(mesh, layout) that builds what a rank trains and
returns its step, a function without arguments. `mesh` is a DeviceMesh with the dimensions "dp", "cp",
"pp" and "tp", `layout` what you say with --layout. The process group is open already. Modules are made
on "meta", sharded, then brought to memory with to_empty; no tensor has a value, so that nothing may ask
for one (loss.item()). The same function trains on real ranks. The smallest way to begin:
"""
_PLAN = """\
Says how to split a model among GPUs, whether it fits, and how long a step takes: nine times in ten
between the two numbers in brackets. Calculated, with constants of a cluster that nobody has measured;
--calibrate takes what yours has reached.

With --layout it answers for that layout, also where it does not fit. Without, it tries all sizes of
groups and micro-batches, ZeRO 0 to 3 (behind a pipeline 1 and 3), recomputation, 1F1B, interleaving and
ZB-H1, and shows the quickest that fit with a fused loss, one for each split among the ranks.
Not tried: ZB-H2 and GPipe, hybrid sharding (HSDP), offloading, tensor ranks without sequence parallelism.
"""
_LAYOUT = """\
layout:
  key=value, with commas between. dp, tp, pp, cp: ranks that share out the data, the matrices, the
  layers, the sequence. Left out, dp takes what is left, and the others are 1. The rest: ep, zero,
  micro_batch, micro_batches, chunks, schedule (gpipe, 1f1b, interleaved, zb-h1, zb-h2),
  sequence_parallel, recompute (none, selective, half, full; plan takes selective), reshard,
  replicas (HSDP's groups, each of which shards), gradient_bytes (4 or 2), order=tp/cp/dp/pp (innermost first).
"""
_RESTRICTED = """\
--only and --without:
  the same keys, with slashes between values: --only tp=4/8,zero=3 --without cp,schedule=zb-h1.
  A size alone, as cp, stands for all of it above 1.
"""
_MODEL = f"""\
model:
  {textwrap.fill(", ".join(models()), 96, subsequent_indent="  ")},
  in any case, or the path of a config.json of Hugging Face, or layers=48,width=6144,heads=48,vocab=64000
  and what differs from a GPT: kv_heads, head_dim, ffn, gated, tied, bias, positions, experts, top_k, shared, dense,
  kv_rank, query_rank, rotary (latent attention). Both together: 8B,vocab=32000.
"""
_HARDWARE = f"""\
hardware:
  {", ".join(gpus())}, and what differs from it: H100,inter_bandwidth=12.5e9. peak in
  FLOP/s, hbm_bytes in B, hbm_bandwidth in B/s, node in GPUs; intra_bandwidth and inter_bandwidth in B/s
  for each GPU (50e9 for a card of 400 Gbit/s); intra_latency and inter_latency in s.
"""
_ROWS = """\
--calibrate:
  a CSV file with a line for each step that you measured, and the columns layout, seq and seconds; also
  model and hardware, where they are not those of the question. All as on the command line, in quotes:
  "dp=8,zero=3,micro_batch=2",8192,1.73
"""


def add_to(commands: argparse._SubParsersAction) -> None:
    """Adds both commands to the course's command line."""
    form = argparse.RawDescriptionHelpFormatter
    example = textwrap.indent(_EXAMPLE.read_text(encoding="utf-8"), "    ")
    trace = commands.add_parser(
        "trace",
        help="your program as one rank of thousands: what it sends, computes and holds",
        description=f"{_TRACE}\n{example}",
        epilog=f"{_LAYOUT}\n{_MODEL}\n{_HARDWARE}",
        formatter_class=form,
    )
    trace.add_argument("program", type=Path, metavar="PROGRAM", help="a Python file")
    trace.add_argument("--ranks", type=int, required=True, metavar="N", help="how many there are")
    trace.add_argument("--layout", required=True, metavar="LAYOUT", help="tp=8,pp=16,dp=128")
    several = "which to trace, one or several (default: 0)"
    trace.add_argument("--rank", type=int, nargs="+", default=[0], metavar="R", help=several)
    beside = "say what differs from the plan of this model; needs --seq"
    trace.add_argument("--model", metavar="MODEL", help=beside)
    trace.add_argument("--seq", type=int, metavar="S", help="tokens in a sequence")
    _add_common(trace, "tracing")

    plan = commands.add_parser(
        "plan",
        help="how to split a model among GPUs, whether it fits, how long a step takes",
        description=_PLAN,
        epilog=f"{_MODEL}\n{_HARDWARE}\n{_LAYOUT}\n{_RESTRICTED}\n{_ROWS}",
        formatter_class=form,
    )
    plan.add_argument("--model", required=True, metavar="MODEL", help="70B, or a config.json")
    plan.add_argument("--seq", type=int, required=True, metavar="S", help="tokens in a sequence")
    plan.add_argument(
        "--gpus", type=int, metavar="N", help="how many; with --layout as many as it has"
    )
    of_layout = "sequences in a step; with --layout those of its micro-batches"
    plan.add_argument("--batch", type=int, metavar="B", help=of_layout)
    plan.add_argument("--layout", metavar="LAYOUT", help="your own: dp=8,tp=8,pp=2,zero=1")
    plan.add_argument("--only", default="", metavar="LAYOUT", help="try these: tp=4/8,zero=3")
    plan.add_argument("--without", default="", metavar="LAYOUT", help="do not try these: cp,zero=0")
    plan.add_argument(
        "--tokens", type=float, metavar="T", help="of the whole run, for its days: 15e12"
    )
    precision = "of the matrices: bf16 (default) or fp8"
    plan.add_argument("--precision", default="bf16", metavar="P", help=precision)
    plan.add_argument("--calibrate", type=Path, metavar="CSV", help="steps that you have measured")
    plan.add_argument("--keep", type=int, default=5, metavar="K", help="plans (default: 5)")
    _add_common(plan, "planning")


def _add_common(parser: argparse.ArgumentParser, module: str) -> None:
    parser.add_argument("--hardware", default="H100", metavar="HARDWARE", help="default: H100")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it for a program")
    drawn = "draw a rank's memory and a step's time"
    parser.add_argument("--picture", type=Path, metavar="PNG", help=drawn)
    parser.set_defaults(run=_in_sentences(module))


def _in_sentences(module: str) -> Callable[[argparse.Namespace], None]:
    """What the user got wrong ends the command with its sentence."""

    def command(asked: argparse.Namespace) -> None:
        try:
            for path in filter(None, (asked.json, asked.picture)):
                must_be_writable(path)
            import_module(f"course_planner.{module}").run(asked)
        except ValueError as error:
            sys.exit(str(error))

    return command
