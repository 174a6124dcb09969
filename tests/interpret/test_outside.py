"""The tests of the search for bad values, by Triton's interpreter."""

import pytest

from tests.test_outside import (  # noqa: F401
    test_the_first_of_several,
    test_what_was_seen_before_stays,
    test_without_a_value_to_ignore_every_number_counts,
)

pytestmark = pytest.mark.interpret
