"""A cluster of real processes: the tokens of a plain run whatever the path, every byte declared, everything given back.

Each test starts processes that import torch; they are few and each asks several things of one cluster."""

import asyncio
import itertools
from collections import Counter
from pathlib import Path

import pytest

from dualpath.cluster.cluster import Cluster
from dualpath.cluster.live import RequestFailedError
from dualpath.cluster.replay import Progress, Replay, replay
from dualpath.layout import KVLayout
from dualpath.metrics.schema import RequestRecord
from dualpath.models.card import read_card
from dualpath.paths import Flow, traffic
from dualpath.types import DualPathError, KVDtype, LinkId, Policy, Request, Trajectory, Turn
from dualpath.workload.agents import FreeRunning
from tests.cluster.conftest import BLOCK, MakeConfig, run
from tests.tiny_models import random_prompt, reference_generate

pytestmark = pytest.mark.cluster


def silent(progress: Progress) -> None:
    pass


def agents(count: int, turns: int, first: int, append: int, generate: int) -> list[Trajectory]:
    made = []
    for agent in range(count):
        openings = [Turn(tuple(random_prompt(first + 7 * agent, seed=agent)), generate)]
        rest = [Turn(tuple(random_prompt(append, seed=100 + 10 * agent + k)), generate) for k in range(turns - 1)]
        made.append(Trajectory(f"a{agent}", (*openings, *rest)))
    return made


def declared(done: Replay, layout: KVLayout) -> dict[LinkId, int]:
    """Bytes over each link: the sum over `paths` for every run of every request."""
    total: Counter[LinkId] = Counter()
    for record in done.records:
        for attempt in record.attempts:
            flow = Flow(attempt.pe_read, attempt.de_read, attempt.chunks, attempt.persisted_blocks)
            total.update(traffic(flow, layout, attempt.prefill_engine, attempt.decode_engine))
        assert record.first.pe_read + record.first.de_read + record.first.computed == record.prompt_tokens
    return dict(total)


def expected_replies(model: Path, trajectory: Trajectory, kv_dtype: KVDtype) -> tuple[tuple[int, ...], ...]:
    context: list[int] = []
    replies = []
    for turn in trajectory.turns:
        context += turn.append
        reply = reference_generate(model, context, turn.max_tokens, kv_dtype)
        context += reply
        replies.append(tuple(reply))
    return tuple(replies)


@pytest.mark.parametrize(
    ("policy", "kv_dtype", "chunk_tokens"),
    [
        (Policy.BASIC, KVDtype.FP32, 512),
        (Policy.LAYERWISE, KVDtype.FP32, 512),
        (Policy.DUALPATH, KVDtype.FP32, 512),
        (Policy.DUALPATH, KVDtype.FP32, 24),  # chunked prefill: the appends take several passes
        (Policy.DUALPATH, KVDtype.BF16, 512),
        (Policy.ORACLE, KVDtype.FP16, 512),
    ],
)
def test_tokens_of_a_plain_run_and_every_byte_declared(
    make_config: MakeConfig, tiny_model: Path, policy: Policy, kv_dtype: KVDtype, chunk_tokens: int
) -> None:
    """Issue A, 2 and 6: the same tokens as without a store, and link counters equal to the sum over `paths`."""
    work = agents(count=3, turns=3, first=90, append=40, generate=5)
    limits = {} if policy is Policy.ORACLE else {"snic": 2e6, "cnic": 50e6}
    config = make_config(policy, kv_dtype=kv_dtype, chunk_tokens=chunk_tokens, **limits)

    async def body() -> None:
        done = await replay(config, [FreeRunning(trajectory) for trajectory in work], silent)
        for trajectory, agent in zip(work, done.agents, strict=True):
            assert agent.replies == expected_replies(tiny_model, trajectory, kv_dtype)
        layout = read_card(tiny_model).layout(kv_dtype, BLOCK)
        assert {link: count.nbytes for link, count in done.links.items() if count.nbytes} == declared(done, layout)
        assert done.summary.tokens_by_source.pe_read + done.summary.tokens_by_source.de_read > 0
        if policy in (Policy.BASIC, Policy.LAYERWISE):
            assert done.summary.tokens_by_source.de_read == 0

    run(body())


def test_both_storage_nics_carry_under_dualpath(make_config: MakeConfig) -> None:
    """Issue A, 3: each storage NIC carries 40 to 60 % of the bytes; under basic the decode node's carries none."""
    work = agents(count=4, turns=6, first=300, append=20, generate=3)
    shares = {}

    async def body() -> None:
        for policy in (Policy.BASIC, Policy.DUALPATH):
            config = make_config(policy, root=Path(make_config().store.root) / policy.value, snic=3e6, cnic=24e6)
            done = await replay(config, [FreeRunning(trajectory) for trajectory in work], silent)
            read = {node.name: node.snic_write_bytes for node in done.summary.node}
            shares[policy] = read["d0"] / sum(read.values())

    run(body())
    assert shares[Policy.BASIC] == 0
    assert 0.4 <= shares[Policy.DUALPATH] <= 0.6


def test_a_second_life_finds_what_the_first_one_stored(make_config: MakeConfig, tiny_model: Path) -> None:
    """CASES.md, C4: after a restart the same prompts give the same tokens, from stored blocks."""
    prompt = tuple(random_prompt(10 * BLOCK + 3))
    expected = tuple(reference_generate(tiny_model, prompt, 4))

    async def life() -> RequestRecord:
        records: list[RequestRecord] = []
        async with Cluster.start(make_config(), records.append) as cluster:
            assert await cluster.submit(Request(0, "s", prompt, 4)).answer() == expected
            await cluster.drain()
            assert not any(cluster.controller.held().values())
        return records[0]

    first, second = run(life()), run(life())
    assert (first.first.computed, first.first.persisted_blocks) == (len(prompt), 10)
    assert second.first.pe_read + second.first.de_read == 10 * BLOCK
    assert second.first.persisted_blocks == 0


def test_salt_separates_tenants(make_config: MakeConfig) -> None:
    """CASES.md, C24: another tenant's blocks are never hit."""
    prompt = tuple(random_prompt(6 * BLOCK + 1))
    records: list[RequestRecord] = []

    async def body() -> None:
        async with Cluster.start(make_config(), records.append) as cluster:
            for number, salt in enumerate((b"one", b"two", b"one")):
                await cluster.submit(Request(number, "s", prompt, 1, salt=salt)).answer()
                await cluster.drain()

    run(body())
    assert [record.first.computed for record in records] == [len(prompt), len(prompt), 1]


def test_cancel_anywhere_gives_everything_back(make_config: MakeConfig) -> None:
    """CASES.md, C21: clients leave at every stage; what is held goes back to nothing, and the next answer is right."""
    stored = tuple(random_prompt(60 * BLOCK, seed=1))

    async def body() -> None:
        records: list[RequestRecord] = []
        async with Cluster.start(make_config(snic=3e6, cnic=30e6), records.append) as cluster:
            ids = itertools.count()
            expected = await cluster.submit(Request(next(ids), "s", stored, 12)).answer()
            await cluster.drain()
            for pause in (0.0, 0.05, 0.3, 0.5, 0.7, 0.9):
                handles = [cluster.submit(Request(next(ids), "s", stored, 12)) for _ in range(3)]
                await asyncio.sleep(pause)
                for handle in handles:
                    cluster.cancel(handle.request)
                results = await asyncio.gather(*(handle.answer() for handle in handles), return_exceptions=True)
                assert all(
                    result == expected or (isinstance(result, RequestFailedError) and "cancelled" in str(result))
                    for result in results
                )
                await cluster.drain()
                assert not any(cluster.controller.held().values())
            assert await cluster.submit(Request(next(ids), "s", stored, 12)).answer() == expected
            await cluster.drain()
            assert not any(cluster.controller.held().values())
            assert sum(record.cancelled for record in records) >= 6

    run(body())


def test_drain_wakes_up_when_the_last_request_is_cancelled(make_config: MakeConfig) -> None:
    """No event of a process follows the cancellation of a request that was still waiting for memory."""

    async def body() -> None:
        async with Cluster.start(make_config(pools=8, snic=2e5)) as cluster:
            prompt = tuple(random_prompt(7 * BLOCK))
            first = cluster.submit(Request(0, "s", prompt, 16))
            second = cluster.submit(Request(1, "s", prompt, 16))
            await first.answer()
            drained = asyncio.create_task(cluster.drain())
            await asyncio.sleep(0)
            cluster.cancel(second.request)
            await asyncio.wait_for(drained, 30)
            assert not any(cluster.controller.held().values())

    run(body())


def test_pools_of_one_prompt_serve_many_requests(make_config: MakeConfig, tiny_model: Path) -> None:
    """CASES.md, C29: memory for exactly one prompt, many requests at once: all finish, none is wrong."""
    prompts = [tuple(random_prompt(7 * BLOCK + 1, seed=seed % 3)) for seed in range(12)]
    expected = [tuple(reference_generate(tiny_model, prompt, 3)) for prompt in prompts[:3]]

    async def body() -> None:
        async with Cluster.start(make_config(pools=8)) as cluster:
            for round_ in range(2):
                handles = [
                    cluster.submit(Request(100 * round_ + n, f"s{n}", prompt, 3)) for n, prompt in enumerate(prompts)
                ]
                answers = await asyncio.gather(*(handle.answer() for handle in handles))
                assert answers == [expected[n % 3] for n in range(12)]
            await cluster.drain()
            assert not any(cluster.controller.held().values())

    run(body())


def test_what_can_never_be_served_is_refused_with_the_sizes(make_config: MakeConfig) -> None:
    """CASES.md, C20."""

    async def body() -> None:
        async with Cluster.start(make_config(pools=8)) as cluster:
            for prompt, tokens, says in (
                (8 * BLOCK + 1, 1, "needs 130, there are 128 tokens of KV"),
                (4000, 97, "needs 4097, there are 4096 tokens in the model's context"),
            ):
                with pytest.raises(DualPathError, match=says):
                    cluster.submit(Request(0, "s", tuple(random_prompt(prompt)), tokens))
            with pytest.raises(DualPathError, match=r"token id 5000 is outside \[0, 288\)"):
                cluster.submit(Request(0, "s", (1, 5000), 1))
            await cluster.submit(Request(1, "s", tuple(random_prompt(8 * BLOCK - 1)), 1)).answer()

    run(body())


def test_two_clusters_in_one_process(make_config: MakeConfig, tiny_model: Path, tmp_path: Path) -> None:
    """No module holds state: two clusters side by side answer alike and count apart."""
    prompt = tuple(random_prompt(5 * BLOCK))
    expected = tuple(reference_generate(tiny_model, prompt, 3))

    async def body() -> None:
        async with (
            Cluster.start(make_config(root=tmp_path / "a")) as one,
            Cluster.start(make_config(root=tmp_path / "b")) as two,
        ):
            answers = await asyncio.gather(
                one.submit(Request(0, "s", prompt, 3)).answer(), two.submit(Request(0, "s", prompt, 3)).answer()
            )
            assert list(answers) == [expected, expected]
            await two.submit(Request(1, "s", prompt, 3)).answer()
            await asyncio.gather(one.drain(), two.drain())
            first, second = one.link_counts(), two.link_counts()
            assert first["p0/snic.write"].nbytes + first["d0/snic.write"].nbytes == 0
            assert second["p0/snic.write"].nbytes + second["d0/snic.write"].nbytes > 0

    run(body())


def test_tokens_stream_and_stop_tokens_end_a_reply(make_config: MakeConfig, tiny_model: Path) -> None:
    prompt = tuple(random_prompt(3 * BLOCK, seed=5))
    expected = reference_generate(tiny_model, prompt, 8)
    stop = expected[4]

    async def body() -> None:
        async with Cluster.start(make_config()) as cluster:
            handle = cluster.submit(Request(0, "s", prompt, 8))
            assert [token async for token in handle.tokens()] == expected
            stopped = await cluster.submit(Request(1, "s", prompt, 8, stop_tokens=(stop,))).answer()
            assert list(stopped) == expected[: expected.index(stop) + 1]

    run(body())


@pytest.mark.parametrize("policy", [Policy.DUALPATH, Policy.DUALPATH_RR, Policy.SPLIT, Policy.PE_SCHEDULED])
def test_many_engines_on_many_nodes(make_config: MakeConfig, tiny_model: Path, policy: Policy) -> None:
    """Two prefill engines that share one storage NIC, two decode nodes in groups of their own: the tokens of a plain
    run, every byte declared, and what a policy promises of who reads."""
    work = agents(count=6, turns=3, first=120, append=30, generate=4)
    config = make_config(policy, prefill=(2,), decode=(1, 1), snic=3e6, cnic=50e6)

    async def body() -> None:
        done = await replay(config, [FreeRunning(trajectory) for trajectory in work], silent)
        for trajectory, agent in zip(work, sorted(done.agents, key=lambda a: a.session), strict=True):
            assert agent.replies == expected_replies(tiny_model, trajectory, KVDtype.FP32)
        layout = read_card(tiny_model).layout(KVDtype.FP32, BLOCK)
        assert {link: count.nbytes for link, count in done.links.items() if count.nbytes} == declared(done, layout)
        firsts = [record.first for record in done.records]
        assert {run.prefill_engine for run in firsts} == {"p0.0", "p0.1"}
        assert {run.decode_engine for run in firsts} == {"d0.0", "d1.0"}
        read_by_decode = sum(run.de_read for run in firsts)
        assert (read_by_decode == 0) is (policy is Policy.PE_SCHEDULED)
        if policy is Policy.DUALPATH_RR:
            sides = [run.de_read > 0 for run in firsts if run.pe_read + run.de_read]
            assert abs(sum(sides) - len(sides) / 2) <= 1
        if policy is Policy.SPLIT:
            assert any(run.pe_read and run.de_read for run in firsts)

    run(body())


def test_requests_that_outgrow_the_memory_give_way_and_say_the_same(make_config: MakeConfig, tiny_model: Path) -> None:
    """Device memory for little more than one request at its full length: others start on what is expected of them,
    give way, and go on later with the same tokens."""
    work = agents(count=4, turns=1, first=3 * BLOCK, append=1, generate=4 * BLOCK)
    config = make_config(device=10, expected_output=1)

    async def body() -> None:
        done = await replay(config, [FreeRunning(trajectory) for trajectory in work], silent)
        for trajectory, agent in zip(work, sorted(done.agents, key=lambda a: a.session), strict=True):
            assert agent.replies == expected_replies(tiny_model, trajectory, KVDtype.FP32)
        assert done.summary.preempted > 0
        layout = read_card(tiny_model).layout(KVDtype.FP32, BLOCK)
        assert {link: count.nbytes for link, count in done.links.items() if count.nbytes} == declared(done, layout)

    run(body())


def test_a_forced_reply_goes_into_the_context_and_the_models_own_is_recorded(
    make_config: MakeConfig, tiny_model: Path
) -> None:
    """Teacher-forcing: the client gets the forced tokens, the record what the model would have said after each."""
    prompt = tuple(random_prompt(3 * BLOCK + 5))
    forced = tuple(random_prompt(BLOCK + 3, seed=9))
    records: list[RequestRecord] = []

    async def body() -> None:
        async with Cluster.start(make_config(), records.append) as cluster:
            for number in range(2):  # computed, then loaded
                request = Request(number, "s", prompt, len(forced), turn=number, forced=forced)
                assert await cluster.submit(request).answer() == forced
                await cluster.drain()

    run(body())
    expected = tuple(reference_generate(tiny_model, (*prompt, *forced[:said]), 1)[0] for said in range(len(forced)))
    for record in records:
        assert record.output == forced
        assert record.argmax == expected
        assert all(margin > 0 for margin in record.margins)
    assert records[1].first.pe_read + records[1].first.de_read == 3 * BLOCK


def test_a_forced_reply_outside_the_vocabulary_is_refused(make_config: MakeConfig) -> None:
    async def body() -> None:
        async with Cluster.start(make_config()) as cluster:
            with pytest.raises(DualPathError, match="token id 100000 is outside"):
                cluster.submit(Request(0, "s", (1, 2, 3), 1, forced=(100_000,)))

    run(body())
