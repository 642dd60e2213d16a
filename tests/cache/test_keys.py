"""The chain hash: equal prefixes share names, everything else does not."""

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flowinfer.cache import keys
from flowinfer.cache.keys import NAME_BYTES, chain_hashes, chain_root, extend_chain
from flowinfer.engine import layout

ids = st.lists(st.integers(0, 2**31 - 1), max_size=40).map(lambda values: np.array(values, np.int32))
salts = st.text(max_size=8)


def names(tokens, salt="", namespace="ns", block_tokens=4):
    return chain_hashes(tokens, namespace=namespace, salt=salt, block_tokens=block_tokens)


@given(ids, st.integers(1, 9))
def test_only_full_blocks_have_names(tokens, block_tokens):
    found = names(tokens, block_tokens=block_tokens)
    assert len(found) == len(tokens) // block_tokens
    assert all(len(name) == NAME_BYTES for name in found) and len(set(found)) == len(found)


@given(ids, ids, salts)
def test_names_of_a_prefix_are_a_prefix_of_the_names(head, tail, salt):
    whole = np.concatenate([head, tail])
    assert names(whole, salt)[: len(head) // 4] == names(head, salt)


@given(ids, st.integers(0, 10), salts)
def test_extending_a_chain_equals_hashing_it_at_once(tokens, num_blocks, salt):
    whole = names(tokens, salt)
    cut = min(num_blocks, len(whole))
    parent = whole[cut - 1] if cut else None
    rest = extend_chain(parent, tokens[cut * 4 :], namespace="ns", salt=salt, block_tokens=4)
    assert whole[:cut] + rest == whole


@given(ids, salts, salts, st.text(max_size=4), st.text(max_size=4))
def test_different_salts_or_namespaces_share_no_name(tokens, salt, other_salt, space, other_space):
    if (salt, space) != (other_salt, other_space):
        assert not set(names(tokens, salt, space)) & set(names(tokens, other_salt, other_space))


@given(ids.filter(len), st.data())
def test_one_changed_token_renames_its_block_and_all_later_ones(tokens, data):
    place = data.draw(st.integers(0, len(tokens) - 1))
    changed = tokens.copy()
    changed[place] ^= 1 << data.draw(st.integers(0, 30))
    before, after = names(tokens), names(changed)
    assert before[: place // 4] == after[: place // 4]
    assert not set(before[place // 4 :]) & set(after[place // 4 :])


def test_the_names_stay_what_they_are_on_every_machine():
    tokens = np.arange(130, dtype=np.int32)
    root = chain_root("ns", "salt")
    first = hashlib.blake2b(tokens[:64].astype("<i4").tobytes(), digest_size=16, salt=root).digest()
    found = chain_hashes(tokens, namespace="ns", salt="salt")
    assert found[0] == first
    assert [name.hex() for name in found] == ["a6773cb08433df1b9f4a1e7f858704a3", "150a7a0a0eab26d8f098b5e901715168"]


def test_memory_order_and_byte_order_do_not_matter():
    tokens = np.arange(64, dtype=np.int32)
    assert names(np.repeat(tokens, 2)[::2]) == names(tokens) == names(tokens.astype(">i4"))


def test_a_named_block_is_a_block_of_the_kv_layout():
    assert keys.BLOCK_TOKENS == layout.BLOCK_TOKENS
