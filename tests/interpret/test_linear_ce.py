"""The tests of linear cross-entropy, by Triton's interpreter."""

import pytest

from tests.test_linear_ce import *  # noqa: F403

pytestmark = pytest.mark.interpret


def test_a_row_does_not_depend_on_the_others_interpreted() -> None:
    check_rows_alone("cpu")  # noqa: F405
