"""How values are split over ranks and joined again, and which ranks an index selects."""

from __future__ import annotations

import pytest

from sgpu_magic.runs.sessions.rank_collection import join, ranks_at, split


@pytest.mark.parametrize(
    ("values", "parts", "found"),
    [
        ([1, 2, 3, 4, 5], 2, [[1, 2, 3], [4, 5]]),
        ((1, 2, 3), 3, [(1,), (2,), (3,)]),
        (range(7), 3, [range(3), range(3, 5), range(5, 7)]),
        ([1], 3, [[1], [], []]),
        ("abc", 2, [["a", "b"], ["c"]]),
        ({"x": 1, "y": 2}, 2, [["x"], ["y"]]),
        (iter([1, 2, 3]), 2, [[1, 2], [3]]),
    ],
)
def test_values_are_split_into_contiguous_parts(values: object, parts: int, found: list[object]):
    assert split(values, parts) == found


def test_arrays_tensors_and_frames_are_split_by_rows_and_joined_again():
    numpy, pandas, torch = (pytest.importorskip(name) for name in ("numpy", "pandas", "torch"))
    array, tensor = numpy.arange(10).reshape(5, 2), torch.arange(10).reshape(5, 2)
    frame = pandas.DataFrame({"x": range(5)})
    assert [len(part) for part in split(array, 2)] == [3, 2]
    assert (join(split(array, 2)) == array).all()
    assert torch.equal(join(split(tensor, 3)), tensor)
    # each rank is sent only its own part
    assert [part.untyped_storage().nbytes() for part in split(tensor, 5)] == [16] * 5
    assert join(split(frame, 2)).equals(frame)


def test_what_has_no_parts_stays_a_list():
    assert join([[1], [2, 3]]) == [1, 2, 3]
    assert join([(1,), (2,)]) == (1, 2)
    assert join([1, 2]) == [1, 2]
    assert join(["ab", "c"]) == ["ab", "c"]
    assert join([[1], (2,)]) == [[1], (2,)]


@pytest.mark.parametrize(
    ("key", "found"),
    [(0, (4,)), (-1, (9,)), (slice(0, 2), (4, 6)), (slice(None, None, 2), (4, 9)), ([2, 0], (4, 9)), ([1, 1], (6,))],
)
def test_an_index_selects_ranks(key: int | slice | list[int], found: tuple[int, ...]):
    assert ranks_at(key, (4, 6, 9)) == found


@pytest.mark.parametrize("key", [3, -4, slice(3, 5), [0, 3], []])
def test_an_index_without_a_rank_is_an_error(key: int | slice | list[int]):
    with pytest.raises(IndexError, match="rank"):
        ranks_at(key, (4, 6, 9))
