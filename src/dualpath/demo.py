"""The demo: closed-loop coding agents on one prefill and one decode engine, the same work under each policy.

A warm-up turn fills a store once; every policy then starts from an identical copy of that store and of nothing else.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dualpath.cluster.replay import Replay, Report, replay
from dualpath.cluster.scratch import copy_store, memory_file_system, scratch_directory
from dualpath.config import (
    ClusterConfig,
    DeadlineSection,
    DecodeSection,
    EmulateSection,
    ModelSection,
    NodeSection,
    PrefillSection,
    StoreSection,
)
from dualpath.metrics.schema import RunSummary
from dualpath.models.card import ModelCard, open_model_dir
from dualpath.models.tokenizer import load_tokenizer
from dualpath.store.format import slot_bytes
from dualpath.types import BadInputError, Policy, Role, Trajectory
from dualpath.units import format_size
from dualpath.workload.agents import FreeRunning
from dualpath.workload.coding import coding_agents

CNIC_PER_SNIC = 8
"""The demo's compute NIC over its storage NIC: in the paper, eight GPUs with a 400 Gb/s CNIC each share one 400 Gb/s
SNIC, so that an engine has an eighth of an SNIC and a whole CNIC."""

AGENTS_TOGETHER = 4
"""Agents for whose contexts there is memory on each side at once."""
WRITE_BACK_SLOTS = 8
MOST_AGENTS = 256
LONGEST_READ_S = 600.0
SLACK = 4
"""Deadlines over the time that the emulated links need for everything that may queue on them."""
PREFILL_MEMORY = 256 * 10**6
STORE_CAPACITY = 4 * 10**9
SEGMENT_BLOCKS = 32
"""Small segments, because each policy gets a copy of the store."""

FIRST_CONTEXT = (1500, 2000)
"""Tokens of the agents' first prompts: with the turns that follow, contexts of about 1.5K to 2.2K."""


class DemoOptions(msgspec.Struct, frozen=True):
    """What `dualpath demo` takes. `model`: a Hugging Face directory. `snic`: rate of each emulated storage NIC,
    bytes/s."""

    model: str
    modes: tuple[Policy, ...] = (Policy.BASIC, Policy.DUALPATH, Policy.ORACLE)
    agents: int = 4
    turns: int = 6
    append: int = 32
    generate: int = 4
    snic: float = 40e6
    store: Path | None = None
    first_context: tuple[int, int] = FIRST_CONTEXT


class Emulated(msgspec.Struct, frozen=True):
    snic_bytes_per_s: float
    cnic_bytes_per_s: float


class DemoResult(msgspec.Struct, frozen=True):
    """The demo's JSON object (CLI.md). A figure is None when a policy that it needs did not run.

    R: `hit_bytes`, read under basic. S: `emulated.snic_bytes_per_s`. C: `oracle_jct_s`. `dropped_writes`: full blocks
    that could not be stored, over all runs."""

    runs: dict[Policy, RunSummary]
    speedup: float | None
    ideal_speedup: float | None
    compute_bound: bool | None
    hit_bytes: int | None
    oracle_jct_s: float | None
    tokens_identical: bool
    emulated: Emulated
    kv_dtype: str
    block_tokens: int
    warm_up_s: float
    dropped_writes: int


async def run_demo(options: DemoOptions, report: Report) -> DemoResult:
    """Runs the demo. Raises BadInputError for options that cannot work, DualPathError when a run fails."""
    _check(options)
    directory = Path(options.model)
    card = open_model_dir(directory)
    longest = max(options.first_context) + options.turns * options.append + (options.turns + 1) * options.generate
    if longest > card.max_positions:
        raise BadInputError(
            f"--turns {options.turns} --append {options.append} --generate {options.generate} make contexts of "
            f"{longest} tokens, the model takes {card.max_positions}"
        )
    context_bytes = longest * card.layout(ModelSection().kv_dtype, ModelSection().block_tokens).kv_bytes_per_token
    if context_bytes > options.snic * LONGEST_READ_S:
        raise BadInputError(
            f"--snic is {options.snic:g} bytes/s: reading one context of {format_size(context_bytes)} would take over "
            f"{LONGEST_READ_S / 60:.0f} minutes, at least {format_size(context_bytes / LONGEST_READ_S)}/s is needed"
        )
    trajectories = coding_agents(
        load_tokenizer(directory).encode,
        options.agents,
        options.turns,
        options.append,
        options.generate,
        options.first_context,
    )
    with scratch_directory() as disk, scratch_directory(memory_file_system()) as memory:
        warm_store = options.store or disk / "warm-up"
        started = time.monotonic()
        warm_up = await _warm_up(options, card, longest, warm_store, trajectories, report)
        warm_up_s = time.monotonic() - started
        replies = [agent.replies[0] for agent in warm_up.agents]
        if options.store is not None:
            # From here on the kept store is its owner's again: the policies' copies are made from one of our own.
            copy_store(options.store, disk / "warm-up")
        rest = [_after_warm_up(t, reply) for t, reply in zip(trajectories, replies, strict=True)]
        runs: dict[Policy, RunSummary] = {}
        dropped = warm_up.dropped_writes
        for policy in options.modes:
            root = (memory if policy is Policy.ORACLE else disk) / policy.value
            copy_store(disk / "warm-up", root)
            done = await _replay(demo_config(options, card, root, policy, longest), rest, report)
            runs[policy] = done.summary
            dropped += done.dropped_writes
            shutil.rmtree(root)
    return _compare(options, runs, warm_up_s, dropped)


def _check(options: DemoOptions) -> None:
    if not options.modes:
        raise BadInputError("--modes is empty, at least one policy is needed")
    if options.agents > MOST_AGENTS:
        raise BadInputError(f"--agents is {options.agents}, at most {MOST_AGENTS} share the demo's two engines")
    try:
        if options.store is not None and options.store.exists() and not options.store.is_dir():
            raise BadInputError(f"--store {options.store} is a file, a directory is needed")
    except OSError as error:
        raise BadInputError(f"--store {options.store} cannot be used: {error.strerror}") from None


def demo_config(options: DemoOptions, card: ModelCard, root: Path, policy: Policy, context: int) -> ClusterConfig:
    """1P1D on this machine, with memory for some agents at contexts of up to `context` tokens; others wait for
    theirs. The oracle's links have no limits."""
    layout = card.layout(ModelSection().kv_dtype, ModelSection().block_tokens)
    together = min(options.agents, AGENTS_TOGETHER)
    memory = together * layout.blocks(context) * slot_bytes(layout)
    write_back = WRITE_BACK_SLOTS * slot_bytes(layout)
    cnic = options.snic * CNIC_PER_SNIC
    # However slow the NICs are asked to be, waiting for them is what the demo shows: a deadline is for what is stuck.
    deadlines = DeadlineSection()
    deadlines = msgspec.structs.replace(
        deadlines,
        read=max(deadlines.read, SLACK * memory / options.snic),
        transfer=max(deadlines.transfer, SLACK * memory / cnic),
        write_back=max(deadlines.write_back, SLACK * write_back / options.snic),
    )
    limited = policy is not Policy.ORACLE
    return ClusterConfig(
        node=(
            NodeSection(name="p0", role=Role.PREFILL, staging=memory),
            NodeSection(name="d0", role=Role.DECODE, staging=memory, write_back=write_back),
        ),
        store=StoreSection(
            root=str(root),
            # Twice what the agents' contexts take: nothing is evicted.
            capacity=max(STORE_CAPACITY, 2 * options.agents * layout.blocks(context) * slot_bytes(layout)),
            segment=SEGMENT_BLOCKS * slot_bytes(layout),
        ),
        model=ModelSection(path=options.model),
        policy=policy,
        # Basic keeps all layers of a prompt there, whatever the model's size.
        prefill=PrefillSection(
            kv_memory=max(PREFILL_MEMORY, context * layout.kv_bytes_per_token),
            batch_tokens=max(PrefillSection().batch_tokens, context),
        ),
        decode=DecodeSection(kv_memory=memory),
        deadlines=deadlines,
        emulate=EmulateSection(snic=options.snic, cnic=cnic) if limited else EmulateSection(),
    )


def _after_warm_up(trajectory: Trajectory, reply: tuple[int, ...]) -> Trajectory:
    """What is left of `trajectory` once its first turn was answered with `reply`: the context so far opens the next
    turn's prompt."""
    first, second, *rest = trajectory.turns
    opening = msgspec.structs.replace(second, append=(*first.append, *reply, *second.append))
    return Trajectory(trajectory.session, (opening, *rest))


async def _warm_up(
    options: DemoOptions,
    card: ModelCard,
    context: int,
    root: Path,
    trajectories: Sequence[Trajectory],
    report: Report,
) -> Replay:
    """The first turn of each agent, with links without limits: it fills the store."""
    config = demo_config(options, card, root, Policy.ORACLE, context)
    first = [Trajectory(t.session, t.turns[:1]) for t in trajectories]
    return await _replay(config, first, report, stage="warm-up")


async def _replay(config: ClusterConfig, work: Sequence[Trajectory], report: Report, stage: str = "") -> Replay:
    turns = sum(len(trajectory.turns) for trajectory in work)
    return await replay(config, [FreeRunning(trajectory) for trajectory in work], report, stage, turns=turns)


def _compare(options: DemoOptions, runs: dict[Policy, RunSummary], warm_up_s: float, dropped_writes: int) -> DemoResult:
    basic, dual, oracle = (runs.get(policy) for policy in (Policy.BASIC, Policy.DUALPATH, Policy.ORACLE))
    hit_bytes = sum(node.snic_write_bytes for node in basic.node) if basic else None
    ideal = bound = None
    if oracle and hit_bytes is not None:
        one_path, compute = hit_bytes / options.snic, oracle.jct_s
        ideal = max(one_path, compute) / max(one_path / 2, compute)
        bound = compute > one_path / 2
    return DemoResult(
        runs=runs,
        speedup=basic.jct_s / dual.jct_s if basic and dual else None,
        ideal_speedup=ideal,
        compute_bound=bound,
        hit_bytes=hit_bytes,
        oracle_jct_s=oracle.jct_s if oracle else None,
        tokens_identical=len({run.tokens_sha256 for run in runs.values()}) == 1,
        emulated=Emulated(options.snic, options.snic * CNIC_PER_SNIC),
        kv_dtype=ModelSection().kv_dtype.value,
        block_tokens=ModelSection().block_tokens,
        warm_up_s=warm_up_s,
        dropped_writes=dropped_writes,
    )
