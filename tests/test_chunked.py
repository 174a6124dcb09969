"""How the rows of linear cross-entropy are cut into chunks."""

import pytest
import torch

from fusedce import chunked

MIB = 1 << 20
SMS = 132


def chunks_of(num_rows: int, depth: int, vocab: int) -> chunked.Chunks:
    hidden, weight = (torch.empty(n, depth, dtype=torch.bfloat16, device="meta") for n in (num_rows, vocab))
    return chunked.gemm_chunks(hidden, weight, SMS, 2 * vocab)


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ((65536, 2048, 124160), 2048),  # 3,200 would fit: 200 tiles of d_hidden in two waves of 132
        ((8192, 4096, 128256), 4096),  # a weight of 1,002 MiB allows as much
        ((32768, 2048, 248320), 2048),
        ((262144, 2048, 1000), 262144),
        ((100, 64, 512), 100),
        ((1, 8, 8), 1),
    ],
)
def test_chunk_size(sizes: tuple[int, int, int], rows: int) -> None:
    assert chunks_of(*sizes)[0] == (0, rows)


@pytest.mark.parametrize("num_rows", [0, 1, 127, 128, 129, 4097, 50000])
@pytest.mark.parametrize(("depth", "vocab"), [(8, 3), (4096, 128256), (2048, 151936), (1, 2_000_000)])
def test_chunks_cover_every_row_once_within_the_workspace(num_rows: int, depth: int, vocab: int) -> None:
    most = max(768 * MIB, 2 * depth * vocab)
    chunks = chunks_of(num_rows, depth, vocab)
    assert [row for start, stop in chunks for row in range(start, stop)] == list(range(num_rows))
    longest = max((stop - start for start, stop in chunks), default=0)
    assert longest * 2 * vocab <= most or longest <= chunked.ROW_MULTIPLE
    assert all(start % chunked.ROW_MULTIPLE == 0 for start, _ in chunks)


def test_the_workspace_is_a_bound_when_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCE_WORKSPACE_MB", "256")
    assert chunks_of(8192, 4096, 128256)[0] == (0, 1024)
    assert chunked.row_chunks(1000, MIB) == [(0, 256), (256, 512), (512, 768), (768, 1000)]
    assert chunked.row_chunks(1000, MIB, 128 * MIB)[0] == (0, 128)
