"""8.1, `model_state_bytes`: answers written from the stub alone."""

from math import ceil


def _right(parameters, shard, stage, sizes):
    return sum(size * (shard if stage >= at else parameters) for size, at in zip(sizes, (3, 2, 1)))


def rounds_the_bytes(
    parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
):
    """Divides the bytes and rounds them up, not the parameters."""
    whole = zip((parameter_bytes, gradient_bytes, optimizer_bytes), (3, 2, 1))
    return sum(
        ceil(n * parameters / world_size) if stage >= at else n * parameters for n, at in whole
    )


def rounds_down(
    parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
):
    """A shard has parameters // world_size, so the remainder is nowhere."""
    if stage not in range(4):
        raise ValueError(stage)
    return _right(
        parameters,
        parameters // world_size,
        stage,
        (parameter_bytes, gradient_bytes, optimizer_bytes),
    )


def shards_parameters_first(
    parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
):
    """Takes the stages in the order parameters, gradients, optimizer."""
    if stage not in range(4):
        raise ValueError(stage)
    return _right(
        parameters,
        ceil(parameters / world_size),
        stage,
        (optimizer_bytes, gradient_bytes, parameter_bytes),
    )


def knows_mixed_precision_only(
    parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
):
    """Ignores the bytes that it is handed, and computes with 2, 2 and 12."""
    if stage not in range(4):
        raise ValueError(stage)
    return _right(parameters, ceil(parameters / world_size), stage, (2, 2, 12))


def takes_any_stage(
    parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
):
    """Raises no ValueError: stage 4 counts as 3, and -1 as 0."""
    return _right(
        parameters,
        ceil(parameters / world_size),
        stage,
        (parameter_bytes, gradient_bytes, optimizer_bytes),
    )


def returns_a_float(
    parameters, world_size, stage, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12
):
    """Divides without rounding, so that a shard is a fraction."""
    if stage not in range(4):
        raise ValueError(stage)
    return _right(
        parameters,
        parameters / world_size,
        stage,
        (parameter_bytes, gradient_bytes, optimizer_bytes),
    )


ANSWERS = {
    "8.1": [
        rounds_the_bytes,
        rounds_down,
        shards_parameters_first,
        knows_mixed_precision_only,
        takes_any_stage,
        returns_a_float,
    ]
}
