"""The sparse backward of linear cross-entropy, by Triton's interpreter."""

import pytest

from tests.test_linear_sparse import *  # noqa: F403
from tests.test_linear_sparse_contract import (  # noqa: F401
    test_double_backward_is_refused,
    test_fullgraph_compile_is_bitwise_eager,
    test_opcheck,
)

pytestmark = pytest.mark.interpret
