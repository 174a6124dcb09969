"""The op contract and the public bug reports of linear cross-entropy, by Triton's interpreter."""

import pytest

from tests.test_linear_ce_contract import (
    test_compile_with_dynamic_rows,  # noqa: F401
    test_fullgraph_compile_is_bitwise_eager,  # noqa: F401
    test_opcheck,  # noqa: F401
    test_opcheck_backward,  # noqa: F401
    test_second_backward_and_double_backward,  # noqa: F401
)
from tests.test_linear_ce_reports import *  # noqa: F403

pytestmark = pytest.mark.interpret
