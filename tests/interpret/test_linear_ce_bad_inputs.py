"""What NaN and infinities may reach, by Triton's interpreter."""

import pytest

from tests.test_linear_ce_bad_inputs import (  # noqa: F401
    test_a_scalar_loss_is_nan_and_says_so,
    test_nan_goes_where_eager_s_goes,
)

pytestmark = pytest.mark.interpret
