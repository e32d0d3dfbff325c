"""PyTorch's collectives, as several rooms watch them. Nothing is imported here: `versions` comes first."""
