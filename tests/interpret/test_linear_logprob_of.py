"""The tests of the log-probs of several words, by Triton's interpreter."""

import pytest

from tests.test_linear_logprob_of import *  # noqa: F403

pytestmark = pytest.mark.interpret
