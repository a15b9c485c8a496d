from __future__ import annotations

import errno
import gc
import mmap
import os
import threading
import weakref

import psutil
import pytest

from ringcore.errors import CapacityError
from ringcore.worker.memory import host_memory
from ringcore.worker.memory.host_memory import HostVirtualMemory, HugePageChunks, HugePages, host_view

MIB = 1 << 20


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


class TestHostVirtualMemory:
    def test_memory_is_taken_as_it_is_written(self) -> None:
        memory = HostVirtualMemory(lambda: 1 << 40)
        address, handle = memory.reserve(1 << 40), memory.create(256 * MIB)  # addresses cost nothing
        assert not os.get_inheritable(handle)
        memory.map(address, 256 * MIB, handle)
        memory.set_access(address, 256 * MIB)
        tensor = host_view(address, 256 * MIB, None)
        assert int(tensor[123456]) == 0
        tensor[:MIB] = 7
        assert os.fstat(handle).st_blocks * 512 < 4 * MIB
        memory.unmap(address, 256 * MIB)
        memory.map(address + 256 * MIB, 256 * MIB, handle)
        assert int(host_view(address + 256 * MIB, MIB, None)[MIB - 1]) == 7, "a handle keeps what it holds"
        memory.unmap(address + 256 * MIB, 256 * MIB)
        memory.release(handle)
        memory.free(address, 1 << 40)

    def test_no_more_than_is_free(self) -> None:
        before = os.listdir("/proc/self/fd")
        with pytest.raises(CapacityError, match=r"host memory: .* bytes asked, .* bytes free") as error:
            HostVirtualMemory(lambda: 8192).create(12288)
        assert error.value.details == {"needed_bytes": 12288, "available_bytes": 8192}
        assert os.listdir("/proc/self/fd") == before

    def test_the_kernels_words(self) -> None:
        memory = HostVirtualMemory(lambda: 1 << 60)
        with pytest.raises(OSError, match="mmap: Cannot allocate memory"):
            memory.reserve(1 << 60)
        with pytest.raises(OSError, match="munmap: Invalid argument"):
            memory.free(1, mmap.PAGESIZE)

    def test_a_view_keeps_its_owner(self) -> None:
        class Owner:
            pass

        memory, owner = HostVirtualMemory(lambda: 1 << 40), Owner()
        address, handle = memory.reserve(mmap.PAGESIZE), memory.create(mmap.PAGESIZE)
        memory.map(address, mmap.PAGESIZE, handle)
        tensor = host_view(address, 100, owner).view(-1)[3:5]

        alive = weakref.ref(owner)
        del owner
        gc.collect()
        assert alive() is not None
        del tensor
        gc.collect()
        assert alive() is None
        memory.unmap(address, mmap.PAGESIZE)
        memory.release(handle)
        memory.free(address, mmap.PAGESIZE)


class TestHugePages:
    @pytest.mark.parametrize("is_old", [False, True])
    def test_all_pages_are_taken_by_threads(self, monkeypatch: pytest.MonkeyPatch, is_old: bool) -> None:
        """is_old: a kernel that cannot take them by a call of their own."""
        if is_old:
            monkeypatch.setattr(host_memory, "_POPULATE_WRITE", 9999)
        pages = HugePages(64 * MIB + 100)
        assert pages.tensor.data_ptr() % (2 * MIB) == 0
        before, lefts, threads = resident(), [], set()

        def may_take(left: int) -> bool:
            lefts.append(left)
            threads.add(threading.current_thread())
            return True

        assert pages.populate(3, 16 * MIB, may_take)
        assert resident() - before > 60 * MIB
        assert lefts == [64 * MIB + 100 - 16 * MIB * i for i in range(5)]
        assert threading.current_thread() not in threads
        assert not pages.tensor.any()
        pages.tensor.fill_(1)
        pages.give_back()
        assert resident() - before < 16 * MIB
        assert not pages.tensor[::4096].any()

    def test_it_can_be_stopped(self) -> None:
        pages = HugePages(64 * MIB)
        before = resident()
        assert not pages.populate(2, 8 * MIB, lambda left: left > 48 * MIB)
        assert resident() - before < 40 * MIB

    def test_a_refusal_ends_all_threads(self) -> None:
        def refuse(left: int) -> bool:
            raise CapacityError("no", needed_bytes=left)

        with pytest.raises(CapacityError, match="no"):
            HugePages(8 * MIB).populate(2, MIB, refuse)
        assert not [thread for thread in threading.enumerate() if thread.name == "host memory"]

    @pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT])
    def test_what_the_kernel_refuses(self, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        pages, asked = HugePages(8 * MIB), []

        def refuse(memory: object, advice: int) -> int:
            asked.append(advice)
            return errno.EINTR if len(asked) == 1 else code

        monkeypatch.setattr(host_memory, "_advise", refuse)
        kind = CapacityError if code == errno.ENOMEM else OSError
        with pytest.raises(kind, match=r"8 MiB more|madvise: Bad address"):
            pages.populate(1, 8 * MIB, lambda left: True)
        assert asked == [23, 23], "an interrupted call is made again"

    def test_nothing_is_no_trouble(self) -> None:
        pages = HugePages(0)
        assert pages.populate(4, MIB, lambda left: True)
        pages.give_back()
        assert len(pages.tensor) == 0


def test_chunks_are_carved_into_tensors_that_do_not_meet():
    chunks = HugePageChunks()
    sizes = [1, 256, 1000, 70 * MIB, 0, 5]
    tensors = [chunks.allocate(size) for size in sizes]
    assert [len(tensor) for tensor in tensors] == sizes
    assert all(tensor.data_ptr() % 256 == 0 for tensor in tensors if len(tensor))
    assert not any(tensor.any() for tensor in tensors if len(tensor) < MIB)
    for number, tensor in enumerate(tensors):
        tensor[-3:] = number + 1
        tensor[:3] = number + 1
    assert [tensor[-1].item() for tensor in tensors if len(tensor)] == [1, 2, 3, 4, 6]
    assert [tensor[0].item() for tensor in tensors if len(tensor)] == [1, 2, 3, 4, 6]
