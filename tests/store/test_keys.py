"""Block keys: a chain that names the whole prefix, the same everywhere."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.store.keys import KEY_BYTES, block_keys, extend_keys, is_root, root_key

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens, tokens, st.integers(1, 5))
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(a: list[int], b: list[int], block_tokens: int) -> None:
    keys = block_keys(a + b, block_tokens)
    assert keys[: len(a) // block_tokens] == block_keys(a, block_tokens)
    assert len(keys) == len(a + b) // block_tokens
    assert all(len(key) == KEY_BYTES and not is_root(key) for key in keys)


@given(tokens, st.integers(1, 5), st.integers(0, 5))
def test_extending_a_chain_gives_the_keys_of_the_whole(a: list[int], block_tokens: int, blocks: int) -> None:
    head = block_keys(a[: blocks * block_tokens], block_tokens, b"salt")
    parent = head[-1] if head else root_key(b"salt")
    assert head + extend_keys(parent, a[len(head) * block_tokens :], block_tokens) == block_keys(
        a, block_tokens, b"salt"
    )


@given(st.lists(st.integers(0, 9), min_size=12, max_size=12), st.integers(0, 11))
def test_changing_one_token_changes_its_block_and_all_after_it(a: list[int], at: int) -> None:
    other = [*a[:at], a[at] + 1, *a[at + 1 :]]
    same = [x == y for x, y in zip(block_keys(a, 3), block_keys(other, 3), strict=True)]
    assert same == [block < at // 3 for block in range(4)]


def test_c24_tenants_share_no_key() -> None:
    assert not set(block_keys(range(64), 4, b"a")) & set(block_keys(range(64), 4, b"b"))
    assert is_root(root_key(b"a"))
    assert root_key(b"a") != root_key(b"b")


def test_token_ids_outside_32_bits_are_refused() -> None:
    for bad in (-1, 2**32):
        with pytest.raises(ValueError, match="token ids"):
            block_keys([bad], 1)


def test_c7_every_process_makes_the_same_keys_and_they_never_change() -> None:
    script = "from dualpath.store.keys import block_keys; print(block_keys(range(100), 16, b'x')[-1].hex())"
    seen = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1", "random")
    }
    assert seen == {block_keys(range(100), 16, b"x")[-1].hex()}
