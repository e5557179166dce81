"""The pool of large CPU tensors: memory comes back exactly when the last tensor over it dies, in bounds, across threads and forks."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import pytest
import torch

from plait.runtime.pool import SMALLEST, Pool, size_class

MIB = 1 << 20


def tensor(pool: Pool, nbytes: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(pool.take(nbytes), 0, (nbytes,), (1,))


def test_block_returns_when_the_last_view_dies() -> None:
    pool = Pool(64 * MIB)
    t = tensor(pool, 4 * MIB)
    where = t.data_ptr()
    view = t.view(torch.float32)[10:20].view(2, 5)
    del t
    gc.collect()
    assert pool.kept == 0
    other = tensor(pool, 4 * MIB)
    assert other.data_ptr() != where
    del view
    assert pool.kept == 4 * MIB
    again = tensor(pool, 4 * MIB - 100)
    assert again.data_ptr() == where
    assert again.untyped_storage().nbytes() == 4 * MIB - 100
    assert (pool.hits, pool.misses) == (1, 2)


def test_memory_is_writable_aligned_and_private_to_each_tensor() -> None:
    pool = Pool(64 * MIB)
    ts = [tensor(pool, n) for n in (SMALLEST, SMALLEST, 3 * MIB, 5 * MIB + 1)]
    for k, t in enumerate(ts):
        t.fill_(k + 1)
    for k, t in enumerate(ts):
        assert t.data_ptr() % 64 == 0
        assert int(t.min()) == int(t.max()) == k + 1
    assert ts[2].data_ptr() % (2 * MIB) == 0


def test_kept_bytes_stay_under_the_limit() -> None:
    pool = Pool(8 * MIB)
    assert not pool.wants(SMALLEST - 1)
    assert pool.wants(SMALLEST)
    assert not pool.wants(8 * MIB + 1)
    ts = [tensor(pool, 3 * MIB) for _ in range(6)]
    del ts
    assert 0 < pool.kept <= 8 * MIB
    pool.clear()
    assert pool.kept == 0


def test_nothing_is_kept_by_a_pool_that_is_gone() -> None:
    pool = Pool(8 * MIB)
    t = tensor(pool, MIB)
    del pool
    gc.collect()
    t.fill_(3)
    del t


def made(pool: Pool, nbytes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return pool.maker(dtype, (nbytes // dtype.itemsize,), (1,), nbytes)()


def test_a_watched_tensor_is_given_out_when_nobody_else_refers_to_it() -> None:
    pool = Pool(64 * MIB)
    t = made(pool, 4 * MIB)
    where = t.data_ptr()
    view = t[5:].numpy()
    del t
    other = made(pool, 4 * MIB)
    assert other.data_ptr() != where
    del view
    again = made(pool, 4 * MIB)
    assert again.data_ptr() == where
    assert again._version == 0
    assert again.untyped_storage().nbytes() == 4 * MIB
    assert (pool.hits, pool.misses) == (1, 2)


def test_memory_of_an_idle_watched_tensor_serves_other_kinds() -> None:
    pool = Pool(64 * MIB)
    where = made(pool, 4 * MIB).data_ptr()
    half = made(pool, 4 * MIB, torch.bfloat16)
    assert half.data_ptr() == where
    assert half.dtype is torch.bfloat16
    del half
    less = made(pool, 4 * MIB - 64)
    assert less.data_ptr() == where
    assert less.untyped_storage().nbytes() == 4 * MIB - 64
    assert pool.misses == 1
    with torch.inference_mode():
        assert made(pool, 2 * MIB).is_inference()
    assert not made(pool, 2 * MIB).is_inference()


def test_shared_memory_is_not_given_out_again() -> None:
    pool = Pool(64 * MIB)
    t = made(pool, MIB)
    t.share_memory_()
    where = t.data_ptr()
    del t
    assert made(pool, MIB).data_ptr() != where


def test_watched_tensors_are_bounded() -> None:
    pool = Pool(16 * MIB)
    few = [made(pool, 3 * MIB) for _ in range(6)]
    assert pool.watched <= 8 * MIB
    del few
    many = [made(pool, SMALLEST) for _ in range(50)]
    assert len({t.data_ptr() for t in many}) == 50
    assert pool.watched <= 6 * MIB + 8 * SMALLEST
    del many
    assert pool.kept <= 16 * MIB
    pool.clear()
    assert pool.watched == pool.kept == 0


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, SMALLEST, MIB - 1, MIB, MIB + 1, 123456789])
def test_size_classes_waste_little(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= nbytes
    assert size % 4096 == 0
    assert size - nbytes <= max(4096, nbytes // 4)
    assert size_class(size) == size


@pytest.mark.parametrize("tensor", [tensor, made])
def test_threads_never_share_a_live_block(tensor: Callable[[Pool, int], torch.Tensor]) -> None:
    pool = Pool(64 * MIB)
    bad: list[str] = []

    def work(mark: int) -> None:
        for _ in range(200):
            t = tensor(pool, SMALLEST)
            t.fill_(mark)
            u = tensor(pool, SMALLEST)
            u.fill_(mark + 20)
            if int(t[0]) != mark or int(t[-1]) != mark or t.data_ptr() == u.data_ptr():
                bad.append(f"thread {mark}")

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not bad
    assert pool.hits > 1000


def test_forked_child_cannot_touch_its_parents_memory() -> None:
    pool = Pool(64 * MIB)
    live = tensor(pool, MIB)
    live.fill_(1)
    free = tensor(pool, MIB)
    free.fill_(2)
    where = free.data_ptr()
    del free
    pid = os.fork()
    if pid == 0:
        live.fill_(9)
        own = tensor(pool, MIB)
        own.fill_(8)
        os._exit(0 if pool.hits == 0 and int(live[0]) == 9 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert int(live.max()) == 1
    again = tensor(pool, MIB)
    assert again.data_ptr() == where
    assert int(again.max()) == 2


def test_a_tensor_of_the_pool_is_like_any_other(tmp_path: object) -> None:
    pool = Pool(64 * MIB)
    x = torch.empty(0, dtype=torch.float32).set_(pool.take(MIB), 0, (512, 512), (1, 512))
    assert x._base is None
    x.copy_(torch.arange(512 * 512).view(512, 512))
    path = f"{tmp_path}/x.pt"
    torch.save(x, path)
    assert torch.equal(torch.load(path, weights_only=True), x)
    assert os.path.getsize(path) < MIB + 4096
    y = x.requires_grad_() * 2
    y.sum().backward()
    assert float(x.grad.sum()) == 2.0 * 512 * 512
