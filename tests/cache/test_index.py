"""The block index against a naive model: a set of (owner, block)."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from flowinfer.cache.index import BlockIndex

OWNERS = ("prefill.0", "decode.0", "disk")
names = st.lists(st.integers(0, 7).map(lambda n: bytes([n])), max_size=8)
updates = st.lists(st.tuples(st.sampled_from(("stored", "removed", "cleared")), st.sampled_from(OWNERS), names))


def build(changes):
    index, model = BlockIndex(), set()
    for what, owner, blocks in changes:
        if what == "cleared":
            index.cleared(owner)
            model -= {pair for pair in model if pair[0] == owner}
        else:
            getattr(index, what)(owner, blocks)
            pairs = {(owner, block) for block in blocks}
            model = model | pairs if what == "stored" else model - pairs
    return index, model


def fewest_changes(blocks, model):
    best = dict.fromkeys(OWNERS, 0)
    for block in blocks:
        holders = [owner for owner in OWNERS if (owner, block) in model]
        best = {owner: min(n + (owner != last) for last, n in best.items()) for owner in holders}
    return min(best.values())


@given(updates)
def test_it_knows_exactly_who_holds_what(changes):
    index, model = build(changes)
    assert len(index) == len({block for _, block in model})
    for block in (bytes([n]) for n in range(8)):
        assert set(index.owners(block)) == {owner for owner in OWNERS if (owner, block) in model}
        assert (block in index) == bool(index.owners(block))
    assert {owner: index.num_blocks(owner) for owner in OWNERS} == {
        owner: sum(holder == owner for holder, _ in model) for owner in OWNERS
    }


@given(updates, names)
def test_the_longest_prefix_ends_at_the_first_block_that_nobody_holds(changes, wanted):
    index, model = build(changes)
    held = {block for _, block in model}
    expected = next((i for i, block in enumerate(wanted) if block not in held), len(wanted))
    prefix = index.longest_prefix(wanted)
    assert len(prefix) == expected == index.num_leading(wanted)
    assert all((owner, block) in model for owner, block in zip(prefix, wanted, strict=False))


@given(updates, names)
def test_the_owner_changes_as_rarely_as_can_be(changes, wanted):
    index, model = build(changes)
    prefix = index.longest_prefix(wanted)
    switches = sum(a != b for a, b in pairwise(prefix))
    assert switches == fewest_changes(wanted[: len(prefix)], model)


def test_a_dead_owner_leaves_what_others_hold():
    index = BlockIndex()
    index.stored("prefill.0", [b"a", b"b"])
    index.stored("prefill.1", [b"a"])
    index.cleared("prefill.0")
    assert index.longest_prefix([b"a", b"b"]) == ["prefill.1"]
