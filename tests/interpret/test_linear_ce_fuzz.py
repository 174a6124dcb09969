"""Random problems of linear cross-entropy, by Triton's interpreter."""

import pytest

from tests.test_linear_ce_fuzz import *  # noqa: F403

pytestmark = pytest.mark.interpret
