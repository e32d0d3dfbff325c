"""Parameters and floating-point operations of a transformer."""

from course_planner.descriptions import Model, one_of, whole

CONVENTIONS = ("6n+attention", "causal", "torchtitan", "sc21", "korthikanti", "selective")


def parameters(model: Model) -> int:
    """The parameters of `model`, counted: what `sum(p.numel() ...)` of such a module gives.

    With biases and learned positions Megatron-LM's 12 l h^2 + 13 l h + (V + s) h (2104.04473,
    eq. 2), and the 2 h of the last LayerNorm, which the paper leaves out. Every expert counts.
    """
    ends = (model.vocab * (1 if model.tied else 2) + model.positions) * model.width
    layers = (model.layers - model.dense) * layer_parameters(model)
    return layers + model.dense * dense_parameters(model) + norm(model) + ends


def layer_parameters(model: Model, tp: int = 1, ep: int = 1) -> int:
    """The parameters of one layer that one of `tp` tensor and `ep` expert ranks holds.

    Matrices are split, and so are the biases of those that are split by columns (Megatron-LM,
    1909.08053, section 3); norms, the router and the other biases are on every rank.
    """
    everywhere = model.width * model.experts + model.shared * mlp_parameters(model, tp)
    return _attention(model, tp) + everywhere + expert_parameters(model, tp, ep)


def dense_parameters(model: Model, tp: int = 1) -> int:
    """The parameters of one of the first layers, which have no experts, on a tensor rank."""
    return _attention(model, tp) + mlps_visited(model) * mlp_parameters(model, tp)


def _attention(model: Model, tp: int) -> int:
    """A layer without its MLPs."""
    biases = (attention_biases(model, tp) + model.width) if model.bias else 0
    return (
        attention_matrices(model, tp) + biases + 2 * norm(model) + model.query_rank + model.kv_rank
    )


def expert_parameters(model: Model, tp: int = 1, ep: int = 1) -> int:
    """The parameters of a rank's MLPs in one layer: of its experts, or of the one that there is."""
    return max(model.experts, 1) // ep * mlp_parameters(model, tp)


def mlp_parameters(model: Model, tp: int = 1) -> int:
    """The parameters of one MLP on a tensor rank."""
    inner = model.ffn // tp
    biases = (inner * (2 if model.gated else 1) + model.width) if model.bias else 0
    return mlp_matrices(model) // tp + biases


def mlps_visited(model: Model) -> int:
    """How many MLPs of a layer a token visits."""
    return max(model.top_k, 1) + model.shared


def attention_matrices(model: Model, tp: int = 1) -> int:
    """Weights of a rank's query, key, value and output matrices; it has at least one KV head.

    Latent attention's matrices into the latent numbers are whole on each tensor rank.
    """
    if model.kv_rank:
        latent = model.query_rank + model.kv_rank + model.rotary
        queries = (model.query_rank or model.width) * (model.head_size + model.rotary)
        others = (2 * model.kv_rank + model.width) * model.head_size
        return model.width * latent + model.heads // tp * (queries + others)
    return model.width * (model.heads * model.head_size // tp + attention_biases(model, tp))


def attention_biases(model: Model, tp: int = 1) -> int:
    """The columns of a rank's query, key and value matrices together."""
    return model.head_size * (model.heads // tp + 2 * max(model.kv_heads // tp, 1))


def mlp_matrices(model: Model) -> int:
    """Weights of one MLP's two matrices, or three."""
    return model.width * model.ffn * (3 if model.gated else 2)


def norm(model: Model) -> int:
    """The parameters of one LayerNorm, or one RMS norm."""
    return model.width * (2 if model.bias else 1)


def flops(model: Model, seq: int, tokens: int, convention: str = "6n+attention") -> int:
    """The floating-point operations of one step over `tokens` tokens in sequences of `seq`.

    A multiplication and an addition are two. Papers count differently, and MFU with them:

        "6n+attention"  6 N + 12 l h s a token (PaLM, 2204.02311, appendix B); N counts every
                        parameter, embedding included; with experts, those that a token visits
        "causal"        the same with half of the attention: 6 N + 6 l h s
        "torchtitan"    6 (N - V h) + 12 l h s: without the input embedding, which multiplies
                        nothing (torchtitan and NeMo, since 12/2024); with a tied one as
                        "6n+attention"
        "sc21"          with every layer's forward pass computed again: Megatron-LM, 2104.04473,
                        eq. 3, 96 B s l h^2 (1 + s / 6h + V / 16 l h)
        "korthikanti"   nothing computed again: 2205.05198, eq. 7,
                        72 B s l h^2 (1 + s / 6h + V / 12 l h)
        "selective"     the hardware's, with attention's core computed again: 2205.05198, eq. 8,
                        72 B s l h^2 (1 + s / 3h + V / 12 l h), as printed

    The last three count matrices alone: twice a weight forward, four times backward. For other
    shapes than the papers' (MLP of 4 h, two matrices, as many KV heads as heads) they count the
    weights that there are, in the same way.
    """
    one_of("convention", convention, CONVENTIONS)
    whole(seq=seq)
    whole(0, tokens=tokens)
    # Forward, of a token: query by key, and weights by value.
    scores = 4 * seq * model.heads * model.score_size
    if convention in ("6n+attention", "causal", "torchtitan"):
        visited = active_parameters(model)
        if convention == "torchtitan" and not model.tied:
            visited -= model.vocab * model.width
        share = 2 if convention == "causal" else 1
        return tokens * (6 * visited + model.layers * 3 * scores // share)
    layer, head = 2 * matrices_visited(model), 2 * model.vocab * model.width
    per_layer = {
        "sc21": 4 * (layer + scores),
        "korthikanti": 3 * (layer + scores),
        "selective": 3 * (layer + 2 * scores),
    }
    return tokens * (model.layers * per_layer[convention] + 3 * head)


def matrices_visited(model: Model) -> int:
    """The weights of one layer's matrices that a token is multiplied with."""
    experts = mlps_visited(model) * mlp_matrices(model) + model.width * model.experts
    return attention_matrices(model) + experts


def active_parameters(model: Model) -> int:
    """The parameters that a token visits: all but those of the experts it is not sent to."""
    idle = 0
    if model.experts:
        idle = expert_parameters(model) // model.experts * (model.experts - model.top_k)
    return parameters(model) - (model.layers - model.dense) * idle
