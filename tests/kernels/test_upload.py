"""Arrays that share one copy are apart again on the device."""

from __future__ import annotations

import numpy as np
import torch

from ringcore.kernels.launch.upload import upload, upload_packed

CPU = torch.device("cpu")
ARRAYS = [
    np.array([1.5, -2.0, 3.25], dtype=np.float32),
    np.array([[7, 8], [9, -1], [2**31 - 1, -(2**31)]], dtype=np.int32),
    np.zeros(0, dtype=np.int32),
    np.zeros((0, 4), dtype=np.float32),
    np.arange(24, dtype=np.int32).reshape(4, 6)[:, 1:4],  # a block table cut to the longest row
    np.arange(8, dtype=np.int32),  # as many as two steps of the alignment
    np.array([-0.0], dtype=np.float32),
]


def test_shapes_dtypes_and_numbers_are_the_arrays() -> None:
    found = upload_packed(ARRAYS, CPU)
    for tensor, array in zip(found, ARRAYS, strict=True):
        assert tensor.dtype == (torch.float32 if array.dtype == np.float32 else torch.int32)
        assert tuple(tensor.shape) == array.shape
        assert tensor.tolist() == array.tolist()
    assert np.signbit(found[-1].numpy()).all(), "bit for bit"


def test_each_starts_at_16_bytes_and_none_ends_past_the_copy() -> None:
    found = upload_packed(ARRAYS, CPU)
    memory, first = found[0].untyped_storage(), found[0].data_ptr()
    at = [tensor.storage_offset() * 4 for tensor in found]
    assert at == [0, 16, 48, 64, 80, 128, 160]  # an empty one has four words too
    assert memory.nbytes() == 176
    assert all(tensor.data_ptr() - first == offset for tensor, offset in zip(found, at, strict=True) if len(tensor))


def test_an_array_that_is_not_contiguous() -> None:
    column = np.arange(12, dtype=np.int64).reshape(4, 3)[:, 1]
    assert upload(column, CPU).tolist() == [1, 4, 7, 10]
    assert upload(column, CPU).is_contiguous()
    assert upload(column[::-1], CPU).tolist() == [10, 7, 4, 1]
