"""Which units kernels may fill."""

import threading

import pytest

from fusedce import arch


def units() -> int:
    return arch.of_device("cpu").num_units


def test_units_are_kept_free_inside_and_in_this_thread_alone() -> None:
    usual, seen = units(), []
    with arch.keep_units_free(8):
        assert units() == usual - 8
        thread = threading.Thread(target=lambda: seen.append(units()))
        thread.start()
        thread.join()
        with arch.keep_units_free(0):
            assert units() == usual
        with arch.keep_units_free(10_000):
            assert units() == 1
        assert units() == usual - 8
    assert units() == usual and seen == [usual]
    with pytest.raises(KeyError), arch.keep_units_free(8):
        raise KeyError
    assert units() == usual
