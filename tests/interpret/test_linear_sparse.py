"""The sparse backward of linear cross-entropy, by Triton's interpreter."""

import pytest

from tests.test_linear_sparse import *  # noqa: F403

pytestmark = pytest.mark.interpret
