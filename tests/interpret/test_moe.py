"""The tests of the mixture of experts, by Triton's interpreter."""

import pytest

from tests.test_moe_experts import *  # noqa: F403
from tests.test_moe_plan import *  # noqa: F403
from tests.test_moe_route import *  # noqa: F403

pytestmark = pytest.mark.interpret
