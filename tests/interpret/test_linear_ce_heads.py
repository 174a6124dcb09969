"""The tests of the loss of several heads, by Triton's interpreter."""

import pytest

from tests.test_linear_ce_heads import *  # noqa: F403

pytestmark = pytest.mark.interpret
