"""What a rank keeps from one call of its `Ranks` to the next."""


class Kept:
    """A place for attributes of any name. Each rank has one of its own, and so has the kernel."""

    def __getattr__(self, name: str):
        raise AttributeError(
            f"kept has no {name!r} here: an earlier call of these ranks has to set kept.{name}"
        )

    def __reduce__(self):
        return "kept"  # by its name: a function finds that of the process in which it runs


kept = Kept()
