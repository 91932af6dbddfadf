"""The layout of packed rows, with numbers written by hand."""

from __future__ import annotations

import numpy as np
import pytest
from reference.packing_reference import ragged_batch

from trl_grpo_ext.learner.packing import IrregularRowsError, Segment, pack_batch

# Two prompt columns, three completion columns. Rows 0 and 2 share the prompt (5, 6); row 1 has the prompt (7).
INPUT_IDS = np.array([[5, 6, 11, 12, 13], [0, 7, 21, 22, 0], [5, 6, 31, 0, 0], [5, 6, 0, 0, 0]])
MASK = np.array([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])


def test_a_shared_prompt_stands_once_in_front_of_its_completions():
    (packed,) = pack_batch(INPUT_IDS, MASK, 3, min_token_ratio=1.0)
    # The last token of a completion predicts nothing and is left out; row 3 has nothing to score.
    assert packed.input_ids_S.tolist() == [5, 6, 11, 12, 7, 21]
    assert packed.position_ids_S.tolist() == [0, 1, 2, 3, 1, 2]
    assert packed.segments == (Segment(0, 2), Segment(2, 2, prefix=0), Segment(4, 2))
    # Rows 0, 2, 1: the first token of both completions is predicted by the prompt's last.
    assert packed.source_N.tolist() == [1, 2, 3, 1, 4, 5]
    assert packed.label_N.tolist() == [11, 12, 13, 31, 21, 22]
    assert packed.target_N.tolist() == [0, 1, 2, 6, 3, 4]


def test_below_the_ratio_rows_are_merely_unpadded():
    # 4 + 2 tokens alone against 4 shared: a ratio of 1.5.
    (packed,) = pack_batch(INPUT_IDS, MASK, 3, min_token_ratio=1.51)
    assert packed.input_ids_S.tolist() == [5, 6, 11, 12, 7, 21, 5, 6]
    assert packed.segments == (Segment(0, 4), Segment(4, 2), Segment(6, 2))
    assert packed.source_N.tolist() == [1, 2, 3, 4, 5, 7]
    (packed,) = pack_batch(INPUT_IDS, MASK, 3, min_token_ratio=1.5)
    assert packed.segments[1].prefix == 0


def test_a_budget_cuts_between_groups_before_it_cuts_one():
    sizes = {
        budget: [chunk.input_ids_S.tolist() for chunk in pack_batch(INPUT_IDS, MASK, 3, min_token_ratio=1, **limit)]
        for budget, limit in ((b, {"max_packed_tokens": b}) for b in (6, 5, 3, 1))
    }
    assert sizes[6] == [[5, 6, 11, 12, 7, 21]]
    assert sizes[5] == [[5, 6, 11, 12], [7, 21]]
    # Below the size of row 0 alone, the group is split, its prompt repeated, and row 0 stands alone.
    assert sizes[3] == [[5, 6, 11, 12], [5, 6], [7, 21]]
    assert sizes[1] == [[5, 6, 11, 12], [5, 6], [7, 21]]


def test_without_completions_one_prompt_is_left():
    mask = MASK.copy()
    mask[:, 2:] = 0
    (packed,) = pack_batch(INPUT_IDS, mask, 3)
    assert packed.input_ids_S.tolist() == [5, 6]
    assert packed.source_N.size == packed.label_N.size == packed.target_N.size == 0


@pytest.mark.parametrize("budget", [None, 60, 30, 20, 1])
@pytest.mark.parametrize("ratio", [1.0, 1.2, 3.0, float("inf")])
def test_every_kept_token_is_scored_once_and_predicted_by_the_token_before_it(budget, ratio):
    input_ids, mask, num_kept = (x.numpy() if hasattr(x, "numpy") else x for x in ragged_batch())
    chunks = pack_batch(input_ids, mask, num_kept, min_token_ratio=ratio, max_packed_tokens=budget)
    targets = np.concatenate([chunk.target_N for chunk in chunks])
    assert sorted(targets) == np.flatnonzero(mask[:, -num_kept:]).tolist()
    width = input_ids.shape[1] - num_kept
    for chunk in chunks:
        assert sum(segment.length for segment in chunk.segments) == chunk.input_ids_S.size
        for source, label, target in zip(chunk.source_N, chunk.label_N, chunk.target_N, strict=True):
            row, column = target // num_kept, width + target % num_kept
            assert label == input_ids[row, column]
            assert chunk.position_ids_S[source] == column - 1
            # Walk back through the segment and its prompt: exactly the row's tokens up to there.
            index = max(i for i, segment in enumerate(chunk.segments) if segment.start <= source)
            segment = chunk.segments[index]
            seen = chunk.input_ids_S[segment.start : source + 1].tolist()
            if segment.prefix >= 0:
                prefix = chunk.segments[segment.prefix]
                seen = chunk.input_ids_S[prefix.start : prefix.start + prefix.length].tolist() + seen
            assert seen == input_ids[row, :column][mask[row, :column] == 1].tolist()
        is_one_row = len(set(chunk.target_N // num_kept)) == 1
        assert budget is None or chunk.input_ids_S.size <= budget or is_one_row


@pytest.mark.parametrize(
    ("row", "column", "value", "message"),
    [(0, 1, 0, "prompt of row 0 is not padded on the left"), (0, 3, 0, "completion of row 0"), (1, 1, 0, "is empty")],
)
def test_holes_are_named(row, column, value, message):
    mask = MASK.copy()
    mask[row, column] = value
    with pytest.raises(IrregularRowsError, match=message):
        pack_batch(INPUT_IDS, mask, 3)
