"""The order of an epoch's samples: shuffled in blocks, the same from any point on."""

from __future__ import annotations

import itertools
import time

import pytest

from training import batches
from training.batches import shuffled


@pytest.mark.parametrize("length", [1, 7, 256, 1000, 70_000])
@pytest.mark.parametrize("block", [1, 256])
def test_each_sample_comes_once(length: int, block: int) -> None:
    order = list(shuffled(length, block, "1 0"))
    assert sorted(order) == list(range(length))
    if length > 7:
        assert order != sorted(order)
        assert order != list(shuffled(length, block, "1 1"))


@pytest.mark.parametrize("skip", [0, 1, 31, 32, 33, 64, 99, 100, 101])
def test_it_goes_on_from_any_sample(monkeypatch: pytest.MonkeyPatch, skip: int) -> None:
    monkeypatch.setattr(batches, "GROUP", 32)
    whole = list(shuffled(100, 8, "1 0"))
    assert list(shuffled(100, 8, "1 0", skip)) == whole[skip:]


def test_samples_that_come_together_are_of_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "GROUP", 1024)
    order = list(shuffled(100_000, 256, "1 0"))
    first = {sample // 256 for sample in order[:1024]}
    assert len(first) <= 5
    assert len({sample // 256 for sample in order[:8]}) > 1


def test_a_large_data_set_starts_at_once_anywhere() -> None:
    length = 2**31 // 128
    start = time.perf_counter()
    assert len(list(itertools.islice(shuffled(length, 256, "1 0", skip=length - 10), 20))) == 10
    assert time.perf_counter() - start < 5
