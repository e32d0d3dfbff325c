"""What the answers of chapter 04 share."""


def refuse(costs, stages):
    if stages < 1 or stages > len(costs):
        raise ValueError(f"{stages} stages for {len(costs)} layers: each needs at least one.")
