"""Row grouping: order, counts, neighbours, and plans that cover each grouped row exactly once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opentinker_kernels import group_rows

rows_and_slots = st.integers(1, 9).flatmap(
    lambda num_slots: st.tuples(st.lists(st.integers(-1, num_slots - 1), max_size=80), st.just(num_slots))
)


def test_rows_are_sorted_by_slot_stably_and_base_rows_left_out():
    groups = group_rows([2, -1, 0, 2, 0, -1], 4)
    assert groups.slots == (0, 2)
    assert groups.counts == (2, 2)
    assert groups.starts == (0, 2)
    assert groups.row_order_P.tolist() == [2, 4, 0, 3]
    assert groups.inverse_N.tolist() == [2, -1, 0, 3, 1, -1]
    assert groups.segments is None and not groups.covers_all and not groups.is_empty


def test_neighbouring_rows_are_slices_in_any_order_of_slots():
    groups = group_rows(torch.tensor([3, 3, -1, 1, 1, 1]), 5)
    assert groups.segments == (slice(3, 6), slice(0, 2))


def test_one_slot_over_all_rows():
    groups = group_rows([1, 1, 1], 2)
    assert groups.covers_all and groups.segments == (slice(0, 3),)
    assert not group_rows([1, 1, -1], 2).covers_all


@pytest.mark.parametrize("slot_of_row", [[], [-1, -1]])
def test_no_row_with_a_slot_is_empty(slot_of_row):
    groups = group_rows(slot_of_row, 3)
    assert groups.is_empty and groups.batches == () and groups.segments == ()
    assert groups.tiles(16).num_tiles == 0 and not groups.covers_all


@pytest.mark.parametrize("wrong", [[0, 3], [-2], [[0, 1]], [0.0, 1.0]])
def test_wrong_slots_are_refused(wrong):
    with pytest.raises(ValueError, match="slot"):
        group_rows(wrong, 3)


def test_refusal_names_row_and_slot():
    with pytest.raises(ValueError, match=r"row 1 names slot 7, slots are -1\.\.2"):
        group_rows([0, 7], 3)


def test_equal_groups_side_by_side_run_in_place_as_one_batch():
    (batch,) = group_rows([-1, 0, 0, 2, 2, 4, 4], 5).batches
    assert batch.slots == (0, 2, 4) and batch.rows == slice(1, 7) and batch.padding_GM1 is None
    (batch,) = group_rows([4] * 64 + [0] * 64, 5).batches
    assert batch.slots == (4, 0) and batch.rows == slice(0, 128)


def test_short_groups_out_of_order_are_read_in_order_of_slot():
    (batch,) = group_rows([4, 4, 0, 0], 5).batches
    assert batch.slots == (0, 4) and batch.rows.tolist() == [2, 3, 0, 1]


def test_one_tall_group_is_not_padded_onto_the_short_ones():
    batches = group_rows([0, -1] * 50 + [1, 2, 3, 1], 4).batches
    assert [batch.slots for batch in batches] == [(0,), (1, 2, 3)]


def test_tall_neighbours_run_in_place_one_by_one():
    batches = group_rows([0] * 100 + [1] * 90 + [2, 3] * 4, 4).batches
    assert [(batch.slots, batch.height) for batch in batches] == [((0,), 100), ((1,), 90), ((2, 3), 4)]
    assert [batch.rows for batch in batches[:2]] == [slice(0, 100), slice(100, 190)]


@settings(max_examples=150, deadline=None)
@given(rows_and_slots)
def test_groups_partition_the_rows(case):
    slot_of_row, num_slots = case
    groups = group_rows(slot_of_row, num_slots)
    assert sorted(groups.row_order_P.tolist()) == [n for n, slot in enumerate(slot_of_row) if slot >= 0]
    for slot, start, count, run in zip(groups.slots, groups.starts, groups.counts, groups.runs, strict=True):
        rows = groups.row_order_P[start : start + count].tolist()
        assert rows == [n for n, other in enumerate(slot_of_row) if other == slot]
        assert (run is not None) == (rows == list(range(rows[0], rows[0] + count)))
        assert run is None or list(range(run.start, run.stop)) == rows


run_lengths = st.lists(st.tuples(st.integers(-1, 8), st.sampled_from([1, 2, 3, 64, 65, 90])), max_size=8)
rows_in_runs = run_lengths.map(lambda runs: ([slot for slot, length in runs for _ in range(length)], 9))


@settings(max_examples=200, deadline=None)
@given(rows_and_slots | rows_in_runs)
def test_batches_hold_each_grouped_row_once_and_pad_with_own_rows(case):
    slot_of_row, num_slots = case
    groups = group_rows(slot_of_row, num_slots)
    seen = []
    for batch in groups.batches:
        rows_N = torch.arange(len(slot_of_row))[batch.rows]
        rows_GM = rows_N.view(len(batch.slots), batch.height)
        for g, slot in enumerate(batch.slots):
            assert {slot_of_row[n] for n in rows_GM[g].tolist()} == {slot}
        padding_GM = (
            torch.zeros_like(rows_GM, dtype=torch.bool) if batch.padding_GM1 is None else batch.padding_GM1[..., 0]
        )
        seen += rows_GM[~padding_GM].tolist()
    assert sorted(seen) == sorted(groups.row_order_P.tolist())


@settings(max_examples=100, deadline=None)
@given(rows_and_slots, st.sampled_from([1, 4, 16]))
def test_tiles_hold_each_grouped_row_once_and_never_mix_slots(case, block_rows):
    slot_of_row, num_slots = case
    groups = group_rows(slot_of_row, num_slots)
    tiles = groups.tiles(block_rows)
    seen = []
    for slot, start, rows in zip(tiles.slot_T.tolist(), tiles.start_T.tolist(), tiles.rows_T.tolist(), strict=True):
        assert 1 <= rows <= block_rows
        own = groups.row_order_P[start : start + rows].tolist()
        assert {slot_of_row[n] for n in own} == {slot}
        seen += own
    assert seen == groups.row_order_P.tolist()
