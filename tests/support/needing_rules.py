"""The mark of tests that launch under NCCL's rules."""

import pytest

import course_strict as strict
from course_utils.comm import versions

needs_rules = pytest.mark.skipif(
    versions.older_than(strict.OLDEST), reason="NCCL's rules need a newer PyTorch"
)
