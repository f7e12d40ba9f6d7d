"""How many names and numbers are written in a line."""

import pytest

from launcher.text import MANY, fold_names, name_numbers, name_ranks


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([f"node{number}" for number in range(MANY)], [f"node{number}" for number in range(MANY)]),
        ([f"node{number:04}" for number in range(1, 1025)], ["node[0001-1024]"]),
        (
            ["login", *(f"gpu{n}.site" for n in range(5, 20)), "gpu21.site", "gpu21.other"],
            ["login", "gpu[5-19,21].site", "gpu21.other"],
        ),
        ([f"node{number}" for number in (*range(8, 24), 3)], ["node[8-23,3]"]),  # in their order
        ([f"10.0.0.{number}" for number in range(20)], [f"10.0.0.{n}" for n in range(20)]),
        ([f"a{n}-rack-b" for n in range(20)], ["a[0-19]-rack-b"]),
        (["x", "5x", *["vm"] * 20], ["x", "5x", *["vm"] * 20]),
    ],
)
def test_many_names_are_folded_as_slurm_does(names: list[str], folded: list[str]) -> None:
    assert fold_names(names) == folded


def test_many_numbers_are_ranges() -> None:
    assert name_numbers([1, 2, 3]) == "1, 2, 3"
    assert name_numbers([*range(1, 100), 200]) == "1-99, 200"
    assert name_ranks([0, 1, 2, 7]) == "ranks 0-2, 7"
    assert name_ranks([3]) == "rank 3"
