"""What is trained, how it is split, and on what: Model, Layout, Hardware. Each refuses nonsense."""

from dataclasses import dataclass

SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "one_forward_one_backward",
    "interleaved": "interleaved",
    "zb-h1": "zb_h1",
    "zb-h2": "zb_h2",
}  # the papers' names, and those of the functions in course_utils.lesson.schedules
RECOMPUTE = ("none", "selective", "half", "full")
GROUPS = ("tp", "cp", "dp", "pp")


def require(condition: bool, sentence: str) -> None:
    """Raises ValueError with `sentence` where `condition` does not hold."""
    if not condition:
        raise ValueError(sentence)


def whole(least: int = 1, **numbers: int) -> None:
    """Raises ValueError where one of `numbers` is no whole number, or less than `least`."""
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"{name} is a whole number of at least {least}, not {number!r}.")


def one_of(name: str, value: object, allowed) -> None:
    """Raises ValueError where `value` is not among `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} is one of {', '.join(map(str, allowed))}, not {value!r}.")


def rate(name: str, number: float, unit: str) -> None:
    """Raises ValueError for a rate or a size that is far too small for its unit: one in giga."""
    power, prefix = ("e12", "T") if unit == "FLOP/s" else ("e9", "G")
    require(
        number >= 1e6,
        f"{name} is in {unit}, and {number!r} is too little: write {number:g}{power} for {number:g} "
        f"{prefix}{unit}.",
    )


def latency_of(name: str, seconds: float) -> None:
    """Raises ValueError for a latency that is no number of seconds: microseconds, for instance."""
    require(
        0 <= seconds < 1,
        f"{name} is in seconds, and {seconds!r} is none of a network: write 5e-6 for 5 µs.",
    )


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer.

    width: the length of a token's vector (h); ffn: the inner width of the MLP, 4 x width if not
    given; gated: a third matrix in the MLP (SwiGLU); kv_heads: as many as heads if not given
    (grouped-query attention has fewer); head_dim: width / heads if not given; tied: the output
    layer is the embedding's matrix; bias: linear layers with biases and LayerNorms with two
    vectors, otherwise neither, and RMS norms with one; positions: learned position vectors, 0 for
    rotary ones; experts: MLPs a layer, of which each token visits top_k, chosen by a router of
    width x experts; 0: one MLP. shared: more of them, which every token visits; dense: first layers
    without experts, whose MLP is as wide as all that a token visits elsewhere (DeepSeek-V3). kv_rank:
    latent attention (2405.04434, section 2.1), whose keys and values come of so many numbers a
    token, and its queries of query_rank, or of the width; rotary: what they have beside head_dim.
    """

    layers: int
    width: int
    heads: int
    vocab: int
    kv_heads: int | None = None
    ffn: int | None = None
    gated: bool = False
    tied: bool = True
    bias: bool = True
    positions: int = 0
    experts: int = 0
    top_k: int = 0
    shared: int = 0
    dense: int = 0
    head_dim: int | None = None
    kv_rank: int = 0
    query_rank: int = 0
    rotary: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ffn", 4 * self.width if self.ffn is None else self.ffn)
        object.__setattr__(self, "kv_heads", self.heads if self.kv_heads is None else self.kv_heads)
        whole(layers=self.layers, width=self.width, heads=self.heads, vocab=self.vocab)
        whole(kv_heads=self.kv_heads, ffn=self.ffn)
        whole(0, positions=self.positions, experts=self.experts, top_k=self.top_k)
        whole(0, shared=self.shared, dense=self.dense, kv_rank=self.kv_rank)
        whole(0, query_rank=self.query_rank, rotary=self.rotary)
        require(
            self.heads % self.kv_heads == 0,
            f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly.",
        )
        require(
            self.head_dim is not None or self.width % self.heads == 0,
            f"A width of {self.width} cannot be shared out among {self.heads} heads.",
        )
        whole(head_size=self.head_size)
        require(
            self.top_k <= self.experts and (self.top_k > 0) == (self.experts > 0),
            f"A token visits {self.top_k} of {self.experts} experts: give both, or neither.",
        )
        require(
            self.experts > 0 or self.shared == self.dense == 0,
            "Shared experts and dense layers need experts beside them.",
        )
        require(
            self.kv_rank > 0 or self.query_rank == self.rotary == 0,
            "query_rank and rotary are of latent attention: give kv_rank too.",
        )

    @property
    def head_size(self) -> int:
        """The length of a head's vectors."""
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def score_size(self) -> int:
        """The mean length of a head's keys and values, of which attention's core computes."""
        return self.head_size + self.rotary // 2


def check_chunks(schedule: str, p: int, m: int, chunks: int) -> None:
    """Raises ValueError where a schedule of p stages cannot run m micro-batches with so many chunks."""
    require(
        chunks == 1 or schedule == "interleaved",
        f"{chunks} chunks a rank need the interleaved schedule, not {schedule!r}.",
    )
    require(
        chunks > 1 or schedule != "interleaved",
        "The interleaved schedule needs at least 2 chunks a rank; with one it is 1F1B.",
    )
    require(
        schedule != "interleaved" or m % p == 0,
        f"Interleaving needs a multiple of {p} micro-batches (Megatron-LM, 2104.04473, section "
        f"2.2.2), and there are {m}.",
    )


@dataclass(frozen=True)
class Layout:
    """How many ranks split what, and in which order a step runs.

    dp, tp, pp, cp: the sizes of the data, tensor, pipeline and context groups; their product is the
    number of GPUs. ep: ranks of dp x cp that share out the experts. zero: what dp x cp ranks shard
    (ZeRO, 1910.02054): 1 the optimizer, 2 the gradients too, 3 the parameters too; with 3, reshard
    says whether a layer's parameters are given up after its forward pass (FSDP's
    reshard_after_forward), and replicas how many groups of neighbours shard for themselves (HSDP).
    gradient_bytes: of one that is kept, 4 or 2. micro_batch: sequences in one; micro_batches: how many
    a step has for each data-parallel rank. chunks: pieces of the model on a rank. sequence_parallel: tensor ranks
    share out the sequence between their matrices (2205.05198, section 4.2.2). recompute: what the
    backward pass computes again; "selective" (attention's core) keeps as much as flash attention
    does, "half" (every second matrix product) is what torchtitan calls selective. order: the groups, from the one whose ranks are neighbours outwards.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    micro_batch: int = 1
    micro_batches: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = True
    recompute: str = "none"
    reshard: bool = True
    replicas: int = 1
    gradient_bytes: int = 4
    order: tuple[str, ...] = GROUPS

    def __post_init__(self) -> None:
        whole(dp=self.dp, tp=self.tp, pp=self.pp, cp=self.cp, ep=self.ep, chunks=self.chunks)
        whole(micro_batch=self.micro_batch, micro_batches=self.micro_batches)
        whole(replicas=self.replicas)
        one_of("zero", self.zero, range(4))
        one_of("gradient_bytes", self.gradient_bytes, (2, 4))
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("recompute", self.recompute, RECOMPUTE)
        require(
            sorted(self.order) == sorted(GROUPS),
            f"order names each of {', '.join(GROUPS)} once, not {self.order!r}.",
        )
        require(
            self.shards % self.ep == 0,
            f"{self.shards} ranks of data and context cannot form expert groups of {self.ep}.",
        )
        hybrid = self.shards % self.replicas == 0 and self.zero == 3 and self.ep == 1
        require(
            self.replicas == 1 or hybrid,
            f"{self.replicas} replicas share out {self.shards} ranks of data and context evenly, with "
            "zero=3 and without groups of experts.",
        )
        check_chunks(self.schedule, self.pp, self.micro_batches, self.chunks)

    @property
    def gpus(self) -> int:
        """The number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def shards(self) -> int:
        """The ranks that hold the same parameters, and among which ZeRO shards: dp x cp."""
        return self.dp * self.cp

    @property
    def sharding(self) -> int:
        """The ranks among which ZeRO shards."""
        return self.shards // self.replicas

    def sequences(self) -> int:
        """The global batch of a step, in sequences."""
        return self.dp * self.micro_batch * self.micro_batches

    def stage_layers(self, layers: int) -> list[int]:
        """How many of `layers` each stage holds.

        Where they do not divide, the ends hold fewer, the last stage first: the embedding and the
        output layer are there (Llama 3, 2407.21783, section 3.3.2: 126 layers as 128 less 2). With
        chunks they may be all that the very first and the very last piece has.
        """
        pieces = self.pp * self.chunks
        if layers < pieces - (2 if self.chunks > 1 else 0):
            raise ValueError(f"{layers} layers cannot fill {self.pp} stages of {self.chunks} each.")
        counts = [-(-layers // pieces) * self.chunks] * self.pp
        ends = [stage for pair in zip(reversed(range(self.pp)), range(self.pp)) for stage in pair]
        for index in range(sum(counts) - layers):
            counts[ends[index % self.pp]] -= 1
        return counts

    def check(self, model: Model, seq: int) -> None:
        """Raises ValueError, with a sentence, where `model` cannot be split in this way."""
        whole(seq=seq)
        for what, count in {"heads": model.heads, "columns of the MLP": model.ffn}.items():
            require(
                count % self.tp == 0,
                f"{count} {what} cannot be split among {self.tp} tensor ranks.",
            )
        require(
            model.kv_heads % self.tp == 0 or self.tp % model.kv_heads == 0,
            f"{model.kv_heads} KV heads fit neither one nor several on each of {self.tp} ranks.",
        )
        pieces = self.cp * (self.tp if self.sequence_parallel else 1)
        require(seq % pieces == 0, f"A sequence of {seq} cannot be split into {pieces} pieces.")
        require(
            model.positions == 0 or seq <= model.positions,
            f"The model has positions for {model.positions} tokens; the sequence has {seq}.",
        )
        require(
            max(model.experts, 1) % self.ep == 0,
            f"{model.experts} experts cannot be shared out among {self.ep} ranks.",
        )
        self.stage_layers(model.layers)


def sizes_of(layout: Layout) -> str:
    """The sizes of a layout's groups, in words."""
    return " x ".join(f"{name} {getattr(layout, name)}" for name in ("dp", "cp", "pp", "tp"))


def described(layout: Layout) -> str:
    """A layout in a line."""
    order = f"{layout.schedule}, {layout.chunks} chunks" if layout.chunks > 1 else layout.schedule
    runs = f"{layout.micro_batches} micro-batches of {layout.micro_batch}"
    kept = " (kept after forward)" if layout.zero == 3 and not layout.reshard else ""
    within = f" within {layout.sharding}" if layout.replicas > 1 else ""
    more = f"ZeRO {layout.zero}{within}{kept}, recompute {layout.recompute}"
    experts = f"; experts on {layout.ep} ranks" if layout.ep > 1 else ""
    sizes = f"{sizes_of(layout)}{experts}"
    return f"{sizes}; {runs}; {order if layout.pp > 1 else 'no pipeline'}; {more}"


@dataclass(frozen=True)
class Hardware:
    """A cluster of nodes of equal GPUs, as far as the estimates see it.

    peak: FLOP/s of a GPU in the precision of the matrices; hbm_bytes and hbm_bandwidth: its memory
    in bytes, and B/s; node: GPUs a node. intra_bandwidth: B/s that a GPU sends to others of its node,
    as nccl-tests' busbw in one node. inter_bandwidth: B/s of the network card of ONE GPU, as busbw
    of two nodes with one GPU each; with all of a node's GPUs, busbw is that times their number.
    The latencies are seconds of one hop. flash: of the peak, what the instructions of flash attention
    can reach: 2/3 on Hopper, since FlashAttention-2 has those of A100 (2402.13499); 1 with cuDNN's.
    """

    peak: float
    hbm_bytes: int
    hbm_bandwidth: float
    node: int
    intra_bandwidth: float
    intra_latency: float
    inter_bandwidth: float
    inter_latency: float
    flash: float = 1.0

    def __post_init__(self) -> None:
        whole(node=self.node)
        rate("peak", self.peak, "FLOP/s")
        rate("hbm_bytes", self.hbm_bytes, "B")
        for name in ("hbm_bandwidth", "intra_bandwidth", "inter_bandwidth"):
            rate(name, getattr(self, name), "B/s")
        for name in ("intra_latency", "inter_latency"):
            latency_of(name, getattr(self, name))
