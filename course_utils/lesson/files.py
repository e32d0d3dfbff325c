"""Files that a command is asked to write; without PyTorch, for which arithmetic need not wait."""

from pathlib import Path


def must_be_writable(path: Path) -> None:
    """Raises ValueError, with a sentence, where `path` cannot be written; an empty file is made."""
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({error.strerror}); choose another file."
        ) from error
