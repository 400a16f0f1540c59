import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from glm_lora.train.batching import assign_ranks, micro_batches

LENGTHS = st.lists(st.integers(1, 500), max_size=60)


@given(LENGTHS, st.integers(1, 8))
def test_every_sample_has_one_rank(lengths, ranks):
    shares = assign_ranks(lengths, ranks)
    assert len(shares) == ranks
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 8))
def test_token_counts_differ_by_at_most_the_longest_sample(lengths, ranks):
    loads = [sum(lengths[i] for i in share) for share in assign_ranks(lengths, ranks)]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(LENGTHS, st.integers(1, 1000), st.booleans())
def test_micro_batches_hold_every_sample_once_and_keep_the_budget(lengths, budget, padded):
    batches = micro_batches(range(len(lengths)), lengths, budget, padded=padded)
    assert Counter(i for b in batches for i in b) == Counter(range(len(lengths)))
    for batch in batches:
        cost = (
            max(lengths[i] for i in batch) * len(batch)
            if padded
            else sum(lengths[i] for i in batch)
        )
        assert cost <= budget or len(batch) == 1


def test_equal_lengths_fill_the_budget():
    batches = micro_batches(range(128), [5] * 128, 320)
    assert [len(b) for b in batches] == [64, 64]
    assert len(batches) == math.ceil(128 * 5 / 320)
