"""The tests of the loss's options, by Triton's interpreter."""

import pytest

from tests.test_linear_ce_loss import *  # noqa: F403

pytestmark = pytest.mark.interpret
