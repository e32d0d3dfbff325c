"""What the exercises of chapter 09 share."""

import io
from dataclasses import dataclass
from typing import Any

import torch

from course_exercises.authoring import Wrong


@dataclass(frozen=True)
class Raised:
    """What came instead of a checkpoint."""

    text: str

    def __repr__(self) -> str:
        return self.text


def through_file(state: Any) -> Any:
    """What comes back from a file; raises Wrong where it cannot be read as it should."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    try:
        return torch.load(file, weights_only=True)
    except Exception as error:  # noqa: BLE001 - it refuses in many ways
        expected = "a state that torch.load(..., weights_only=True) reads"
        raise Wrong("not-plain", expected=expected, got=type(error).__name__) from None
