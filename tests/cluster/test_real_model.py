"""The real model over both paths: every policy says what transformers says."""

from pathlib import Path

import pytest
import torch

from dualpath.cluster.replay import Progress, replay
from dualpath.config import ClusterConfig, DecodeSection, EmulateSection, NodeSection, StoreSection
from dualpath.models.bundled import ensure_bundled
from dualpath.models.tokenizer import load_tokenizer
from dualpath.types import Policy, Role, Trajectory
from dualpath.workload.agents import FreeRunning
from dualpath.workload.coding import coding_agents
from tests.cluster.conftest import run
from tests.tiny_models import reference_generate

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(400)]


def config(root: Path, policy: Policy) -> ClusterConfig:
    memory = 20 * 2_949_120
    return ClusterConfig(
        node=(
            NodeSection(name="p0", role=Role.PREFILL, staging=memory),
            NodeSection(name="d0", role=Role.DECODE, staging=memory),
        ),
        store=StoreSection(root=str(root), segment=100 * 10**6),
        policy=policy,
        decode=DecodeSection(kv_memory=memory),
        emulate=EmulateSection() if policy is Policy.ORACLE else EmulateSection(snic=40e6, cnic=320e6),
    )


def oracle_replies(model: Path, trajectories: list[Trajectory]) -> list[tuple[tuple[int, ...], ...]]:
    """Greedy generation by transformers, in fp32 and without any cache of ours."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answers = []
    for trajectory in trajectories:
        context: list[int] = []
        replies = []
        for turn in trajectory.turns:
            context += turn.append
            prompt = torch.tensor([context])
            mask = torch.ones_like(prompt)
            out = lm.generate(
                prompt, attention_mask=mask, max_new_tokens=turn.max_tokens, do_sample=False, eos_token_id=None
            )
            reply = tuple(out[0, len(context) :].tolist())
            context += reply
            replies.append(reply)
        answers.append(tuple(replies))
    return answers


def test_every_policy_says_what_transformers_says(tmp_path: Path) -> None:
    """Issue A, 2: all policies, a plain single-process run without a store, and transformers: the same tokens."""
    model = ensure_bundled()
    work = coding_agents(load_tokenizer(model).encode, agents=2, turns=2, append=24, generate=4, first=(200, 260))
    expected = oracle_replies(model, work)
    first = [*work[0].turns[0].append]
    assert tuple(reference_generate(model, first, 4)) == expected[0][0]

    async def body() -> None:
        for policy in Policy:
            done = await replay(
                config(tmp_path / policy, policy), [FreeRunning(trajectory) for trajectory in work], silent
            )
            assert [agent.replies for agent in done.agents] == expected
            sources = done.summary.tokens_by_source
            assert sources.pe_read + sources.de_read >= 2 * 2 * 192
            if policy in (Policy.BASIC, Policy.LAYERWISE, Policy.PE_SCHEDULED):
                assert sources.de_read == 0

    run(body(), seconds=300)


def silent(progress: Progress) -> None:
    pass
