"""Programs: C kernels that were recorded compute what they do one by one, and nothing else is recorded."""

from __future__ import annotations

import threading

import pytest
import torch

from ringcore.kernels.native.program import NativeProgram, NotRecordable, Workspace, programs_library
from ringcore.kernels.native.row_kernels import row_kernels

pytestmark = pytest.mark.skipif(row_kernels() is None, reason="no C compiler")
SIZE = 480


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def program(workspace: Workspace | None = None) -> NativeProgram:
    return NativeProgram(programs_library(), workspace or Workspace())


def some_layers(x: torch.Tensor, gain: torch.Tensor, layers: int = 20) -> torch.Tensor:
    """Each reads what the one before wrote."""
    for _ in range(layers):
        normed = row_kernels().rms_norm(x, gain, 1e-5, torch.float32)
        x = row_kernels().silu_and_mul(normed.view(-1, SIZE)).reshape(len(x) // 2, SIZE)
        x = x.as_strided((2 * len(x), SIZE), (0, 1))
    return x[: len(x) // 2]


@torch.inference_mode()
def test_a_program_is_its_kernels_one_by_one(threads):
    """Also where its threads are more than there are cores."""
    gain = torch.rand(SIZE) + 0.5
    x = torch.randn(64, SIZE)
    expected = []
    for seed in range(3):
        made = torch.randn(64, SIZE, generator=torch.Generator().manual_seed(seed))
        expected.append(some_layers(made, gain).clone())
    assert not torch.equal(expected[0], expected[1])
    recorded = program()
    result = recorded.record(lambda: some_layers(x, gain))
    for num_threads in (1, 2, 5):
        threads(num_threads)
        for seed in range(3):
            x.copy_(torch.randn(64, SIZE, generator=torch.Generator().manual_seed(seed)))
            recorded.run()
            assert torch.equal(result, expected[seed])


@torch.inference_mode()
def test_what_is_no_kernel_is_not_recorded_and_nothing_is_computed():
    x, gain = torch.ones(2, SIZE), torch.ones(SIZE)

    def adds(x: torch.Tensor) -> None:
        row_kernels().silu_and_mul(x)
        x.add_(1)

    def copies(x: torch.Tensor) -> None:
        row_kernels().rms_norm(x, gain, 1e-5, torch.float32).t().reshape(-1)

    for function, name in ((adds, "add_"), (copies, "clone|copy")):
        with pytest.raises(NotRecordable, match=name):
            program().record(lambda function=function: function(x))
    assert torch.equal(x, torch.ones(2, SIZE))
    assert row_kernels().rms_norm(x, gain, 0.0, torch.float32).allclose(x)  # kernels are run again


@torch.inference_mode()
def test_memory_between_kernels_is_used_again():
    """Of 20 layers as much as of two at a time; what is too large for it is refused."""
    rows, bytes_of_row = 64, 4 * SIZE
    gain, x = torch.ones(SIZE), torch.randn(rows, SIZE)
    program(Workspace(3 * rows * bytes_of_row)).record(lambda: some_layers(x, gain))
    with pytest.raises(NotRecordable, match="bytes more between kernels"):
        program(Workspace(rows * bytes_of_row)).record(lambda: some_layers(x, gain))


@torch.inference_mode()
def test_other_threads_are_not_recorded():
    x, gain, found = torch.randn(2, SIZE), torch.ones(SIZE), []
    expected = row_kernels().rms_norm(x, gain, 1e-5, torch.float32)

    def elsewhere() -> None:
        found.append(row_kernels().rms_norm(x, gain, 1e-5, torch.float32))

    def record() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    program().record(record)
    assert torch.equal(found[0], expected)
