"""The tests of routing's options and of the losses on a router, by Triton's interpreter."""

import pytest

from tests.test_moe_balance import *  # noqa: F403
from tests.test_moe_route_choice import *  # noqa: F403

pytestmark = pytest.mark.interpret
