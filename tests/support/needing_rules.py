"""The mark of tests that launch under NCCL's rules."""

import pytest

from course_utils import strict, versions

needs_rules = pytest.mark.skipif(
    versions.older_than(strict.OLDEST), reason="NCCL's rules need a newer PyTorch"
)
