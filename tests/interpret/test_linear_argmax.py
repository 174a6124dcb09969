"""The tests of the greedy word, by Triton's interpreter."""

import pytest

from tests.test_linear_argmax import *  # noqa: F403

pytestmark = pytest.mark.interpret
