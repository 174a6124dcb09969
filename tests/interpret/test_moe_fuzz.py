"""Random routings and plans, by Triton's interpreter."""

import pytest

from tests.test_moe_fuzz import *  # noqa: F403

pytestmark = pytest.mark.interpret
