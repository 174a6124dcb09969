"""The one wheel with the extension that the native tests share."""

import pytest

from tests.native.wheels import Build, build


@pytest.fixture(scope="session")
def native_build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The wheel with the extension, for two architectures and PTX, by one compiler process at a time."""
    folder = tmp_path_factory.mktemp("native")
    return build(folder, FUSEDCE_BUILD_EXT="1", TORCH_CUDA_ARCH_LIST="8.0;9.0a+PTX", MAX_JOBS="1")
