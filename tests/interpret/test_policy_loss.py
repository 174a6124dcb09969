"""The tests of the policy loss, by Triton's interpreter."""

import pytest

from tests.test_policy_loss import *  # noqa: F403

pytestmark = pytest.mark.interpret
