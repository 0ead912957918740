"""One forward batch: a prefix of the queue within its limits, the last member cut as late as they allow."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.scheduler.attention_time import AttentionTime
from dualpath.scheduler.pack import Chunk, PackItem, PackLimits, pack

items = st.lists(
    st.builds(PackItem, request=st.integers(0, 10**6), cached=st.integers(0, 300), remaining=st.integers(1, 300)),
    max_size=12,
    unique_by=lambda item: item.request,
)
limits = st.builds(
    PackLimits,
    new_tokens=st.integers(1, 500),
    pool_tokens=st.integers(1, 1500),
    quota_s=st.floats(1e-6, 1e-2),
    n_layer=st.integers(1, 4),
)
TIME = AttentionTime(1e-5, 1e-6, 1e-8, 1e-8, 1e-8)


def seconds(limit: PackLimits, chunks: list[tuple[int, int]]) -> float:
    return limit.n_layer * sum(TIME(cached, new) for cached, new in chunks)


@given(items, limits, st.booleans())
def test_a_batch_is_a_prefix_within_its_limits(queue: list[PackItem], limit: PackLimits, timed: bool) -> None:
    """Only the head's first token may exceed the quota."""
    batch = pack(queue, limit, TIME if timed else None)
    used = list(zip(batch, queue, strict=False))
    assert [chunk.request for chunk, _ in used] == [item.request for item in queue[: len(batch)]]
    assert all(1 <= chunk.new <= item.remaining for chunk, item in used)
    assert all(chunk.new == item.remaining for chunk, item in used[:-1])  # a cut request ends the batch
    assert sum(chunk.new for chunk in batch) <= limit.new_tokens
    assert sum(item.cached + chunk.new for chunk, item in used) <= limit.pool_tokens
    if timed and not (len(batch) == 1 and batch[0].new == 1):
        assert seconds(limit, [(item.cached, chunk.new) for chunk, item in used]) <= limit.quota_s * (1 + 1e-9)


@settings(max_examples=300)
@given(items, limits)
def test_one_more_token_of_the_queue_would_not_fit(queue: list[PackItem], limit: PackLimits) -> None:
    """The cut is maximal, and so is the batch: it ends only where the next token, of the request that is cut or of the
    one after it, breaks a limit."""
    batch = pack(queue, limit, TIME)
    chunks = [(item.cached, chunk.new) for item, chunk in zip(queue, batch, strict=False)]
    if batch and batch[-1].new < queue[len(batch) - 1].remaining:
        cached, new = chunks.pop()
        chunks.append((cached, new + 1))
    elif len(batch) < len(queue):
        chunks.append((queue[len(batch)].cached, 1))
    else:
        return
    assert (
        sum(new for _, new in chunks) > limit.new_tokens
        or sum(cached + new for cached, new in chunks) > limit.pool_tokens
        or (seconds(limit, chunks) > limit.quota_s * (1 - 1e-9) and bool(batch))
    )


@settings(max_examples=50)
@given(items.filter(bool), limits)
def test_chunks_go_on_in_the_next_batch_until_all_is_computed(queue: list[PackItem], limit: PackLimits) -> None:
    """Whatever the quota, if each prompt fits the memory alone: each batch makes progress, every token is computed
    once, and requests are finished in order."""
    limit = PackLimits(limit.new_tokens, max(item.cached + item.remaining for item in queue), limit.quota_s)
    left, finished = list(queue), []
    while left:
        batch = pack(left, limit, TIME)
        assert batch
        for chunk in batch:
            head = left.pop(0)
            if chunk.new < head.remaining:
                left.insert(0, PackItem(head.request, head.cached + chunk.new, head.remaining - chunk.new))
            else:
                finished.append(head.request)
    assert finished == [item.request for item in queue]


def test_the_head_gets_one_token_though_it_exceeds_the_quota() -> None:
    """It is slow, not stuck."""
    assert pack([PackItem(1, 300, 50)], PackLimits(100, 1000, quota_s=1e-9), TIME) == [Chunk(1, 1)]


def test_a_head_that_memory_cannot_hold_gets_nothing() -> None:
    assert pack([PackItem(1, 300, 50), PackItem(2, 0, 1)], PackLimits(100, 300), TIME) == []
