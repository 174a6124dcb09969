"""The tests of vocabulary shards, by Triton's interpreter."""

import pytest

from tests.test_linear_parts import *  # noqa: F403

pytestmark = pytest.mark.interpret
