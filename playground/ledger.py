"""What the ledger page says of a model, ranks and a GPU's memory, as JSON.

Bytes for a parameter are those of mixed precision with Adam (ZeRO, arXiv 1910.02054, section 3.1);
what a stage shards is in its figure 1. Tensor parallelism stays in a node of 8 ranks, and a pipeline
has at most 32 stages, as a model has so many layers; the ranks beyond hold copies.
"""

import json

from playground.guesses import guesses as _guesses

BYTES = {"parameters": 2, "gradients": 2, "optimizer": 12}
SORTS = tuple(BYTES)
NODE, LAYERS = 8, 32
WAYS = {  # what each cuts, and into at most how many parts
    "DDP": ((), 1),
    "ZeRO 1": (("optimizer",), None),
    "ZeRO 2": (("optimizer", "gradients"), None),
    "ZeRO 3": (SORTS, None),
    "tensor parallel": (SORTS, NODE),
    "pipeline": (SORTS, LAYERS),
}


def held(way: str, billions: float, ranks: int) -> dict[str, float]:
    """The GB (10^9 bytes) that each rank holds of each sort."""
    cut, most = WAYS[way]
    parts = min(ranks, most or ranks)
    return {sort: billions * size / (parts if sort in cut else 1) for sort, size in BYTES.items()}


def view(billions: float, ranks: int, memory: float) -> str:
    """All bars of the page."""
    rows = []
    for way in WAYS:
        parts = held(way, billions, ranks)
        total = sum(parts.values())
        largest = memory / sum(held(way, 1, ranks).values())
        rows.append(
            {
                "way": way,
                "most": WAYS[way][1] if WAYS[way][0] else None,
                "parts": parts,
                "total": total,
                "fits": total <= memory,
                "largest": largest,
            }
        )
    return json.dumps(rows)


def fewest(way: str, billions: float, memory: float) -> int | None:
    """The fewest ranks with which it fits; None where no number is enough."""
    whole, cut = (
        sum(held(way, billions, 1).values()),
        sum(billions * BYTES[s] for s in WAYS[way][0]),
    )
    rest = memory - (whole - cut)
    if whole <= memory:
        return 1
    if rest <= 0 or not cut:
        return None
    ranks = int(-(-cut // rest))
    return ranks if sum(held(way, billions, ranks).values()) <= memory else None


def guesses(billions: float, ranks: int) -> str:
    """What one may predict of the GB under ZeRO 2; the sentences are those of exercise 8.1."""
    parts = held("ZeRO 2", billions, ranks)
    right = sum(parts.values())
    other_stage = (
        "Stage 1 shards the optimizer state, the largest part; stage 2 the gradients as well; "
    )
    other_stage += "stage 3 the parameters as well."
    mistakes = [
        *(
            (sum(held(way, billions, ranks).values()), f"That is {way}. {other_stage}")
            for way in ("DDP", "ZeRO 1", "ZeRO 3")
        ),
        (
            right - parts["parameters"],
            "You leave one sort of bytes out. A rank holds parameters, gradients and the optimizer's state.",
        ),
    ]
    return _guesses(right, mistakes)


CELL = """import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from course_utils import hardware
from course_utils.launch import launch
from course_utils.trace import memory_ledger


def train(rank, shard):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(960, 960, bias=False), nn.Linear(960, 960, bias=False))
    model.to(hardware.device())
    model = fully_shard(model) if shard else DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model(torch.ones(4, 960, device=hardware.device())).sum().backward()
    optimizer.step()
    held = memory_ledger(model, optimizer)
    return {sort: round(held[sort] / (2 * 960 * 960), 2) for sort in ("parameters", "gradients", "optimizer")}


for way in ("DDP", "ZeRO 3 (fully_shard)"):
    print(way, launch(train, RANKS, way != "DDP")[0])
"""


def cell(ranks: int) -> str:
    """The cell of a notebook that measures DDP and ZeRO 3 on real ranks, at most four."""
    return CELL.replace("RANKS", str(min(ranks, 4)))
