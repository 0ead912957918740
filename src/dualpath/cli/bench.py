"""`dualpath bench`."""

from __future__ import annotations

import asyncio
import itertools
import math
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from dualpath.cli.common import Json, count, policies, print_json, progress
from dualpath.config import ClusterConfig, load
from dualpath.types import BadInputError, Policy, Role
from dualpath.units import format_size, parse_seconds

if TYPE_CHECKING:
    from dualpath.bench import BenchOptions, BenchResult, Outcome
    from dualpath.cluster.model import ServedModel
    from dualpath.cluster.profile import Profile
    from dualpath.cluster.replay import Report


def _number(name: str, value: float, most: float = math.inf) -> float:
    if not 0 < value <= most or value == math.inf:
        upper = "" if most == math.inf else f" and at most {most:g}"
        raise BadInputError(f"--{name} is {value:g}, a finite number above 0{upper} is needed")
    return value


def _limit(name: str, text: str) -> float:
    try:
        return _number(name, parse_seconds(text))
    except BadInputError as error:
        raise BadInputError(f"--{name} {error}".replace(f"--{name} --{name}", f"--{name}")) from None


def _scale(text: str) -> Fraction:
    try:
        scale = Fraction(text)
    except (ValueError, ZeroDivisionError):
        scale = Fraction(0)
    if not 0 < scale <= 1:
        raise BadInputError(f"--scale-tokens is {text!r}, a fraction above 0 and at most 1 is needed, such as 1/32")
    return scale


def bench(
    cluster: Annotated[Path, typer.Option(help="The cluster file.")],
    trace: Annotated[Path | None, typer.Option(help="A trace; without one, the synthetic one that is shipped.")] = None,
    policy: Annotated[str, typer.Option(help=f"Policies to compare: {', '.join(Policy)}.")] = "basic,dualpath",
    rate: Annotated[float | None, typer.Option(help="Online: agents per second, arriving at random (Poisson).")] = None,
    find_capacity: Annotated[
        bool, typer.Option("--find-capacity", help="Online: search the most agents per second that keep the SLO.")
    ] = False,
    sessions: Annotated[
        int | None, typer.Option(parser=count, metavar="N", help="Sessions of the trace; online: agents that arrive.")
    ] = None,
    max_turns: Annotated[int | None, typer.Option(parser=count, metavar="N", help="Turns of each session.")] = None,
    time_scale: Annotated[float, typer.Option(help="Factor on tool delays and the stopping rule's windows.")] = 1.0,
    scale_tokens: Annotated[str, typer.Option(help="Factor on all lengths, such as 1/32.")] = "1",
    slo_ttft: Annotated[str, typer.Option(help="Limit of the time to the first token.")] = "4s",
    slo_tpot: Annotated[str, typer.Option(help="Limit of the time per further token.")] = "50ms",
    slo_percentile: Annotated[float, typer.Option(help="Percentile of requests that keeps the limits.")] = 50.0,
    no_delays: Annotated[bool, typer.Option("--no-delays", help="Agents do not wait for their tools.")] = False,
    no_store: Annotated[bool, typer.Option("--no-store", help="Keep no KV: every prompt is computed.")] = False,
    warm_up: Annotated[
        bool, typer.Option("--warm-up", help="Each agent's first turn runs before the clock starts.")
    ] = False,
    format: Annotated[str | None, typer.Option(help="The trace's format, where it is not to be detected.")] = None,
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Directory for records, configuration and summary.")] = None,
    json: Json = False,
) -> None:
    """Replay a trace's agents on a cluster, the same work under each policy, compared."""
    chosen = policies(policy, "--policy")
    if rate is not None and find_capacity:
        raise BadInputError(f"--rate is {rate:g}, which --find-capacity would search: use one of them")
    if rate is not None:
        _number("rate", rate)
    try:
        from dualpath.bench import Bench, BenchOptions, Slo
        from dualpath.cluster.model import ServedModel, model_directory
        from dualpath.cluster.replay import Progress
        from dualpath.models.tokenizer import load_tokenizer
        from dualpath.workload.formats import open_trace
        from dualpath.workload.replay import shipped_trace
    except ModuleNotFoundError as error:
        raise BadInputError(f"bench needs the package {error.name}: install dualpath with its extra 'demo'") from None
    online = rate is not None or find_capacity
    options = BenchOptions(
        policies=chosen,
        rate=rate,
        find_capacity=find_capacity,
        agents=sessions if online else None,
        max_turns=max_turns,
        scale=_scale(scale_tokens),
        time_scale=_number("time-scale", time_scale),
        delays=not no_delays,
        warm_up=warm_up,
        store=not no_store,
        slo=Slo(
            _limit("slo-ttft", slo_ttft),
            _limit("slo-tpot", slo_tpot),
            _number("slo-percentile", slo_percentile, 100.0),
        ),
        seed=seed,
    )
    config = load(cluster)
    with progress() as report:
        # Before the event loop, where Ctrl-C would wait for a fetch to end.
        directory = model_directory(config.model.path, lambda what: report(Progress("model", note=what)))
        model = ServedModel.open(config)
        source = open_trace(trace or shipped_trace(), format, load_tokenizer(directory).encode)
        chosen_sessions = list(itertools.islice(source, sessions if not online else None))
        profile, whence = _profile(cluster, config, model, report)
        work = Bench(config, model, profile, chosen_sessions, options, report)
        work.skipped.update(source.skipped)
        _say(f"Profile of this machine: {whence}.")
        _say(f"Reading hits should be bound by: {work.binding()}.")
        outcome = asyncio.run(work.run())
    if out is not None:
        _write(out, config, options, profile, outcome)
    if json:
        print_json(outcome.result)
    else:
        _print(outcome.result, options)
    if any(run.argmax_agreement and run.argmax_agreement.differ for run in outcome.result.runs.values()):
        raise typer.Exit(1)


def _say(text: str) -> None:
    Console(stderr=True).print(text, soft_wrap=True, highlight=False)


def _profile(cluster: Path, config: ClusterConfig, model: ServedModel, report: Report) -> tuple[Profile, str]:
    """The profile beside the cluster file, or one that is measured now; and which of the two it is."""
    from dualpath.cluster.profile import default_file, load_profile, matches
    from dualpath.cluster.profiling import measure

    path = default_file(cluster)
    why = "there is no file"
    if path.exists():
        profile = load_profile(path)
        why = matches(profile, config, model.fingerprint.digest())
        if not why:
            return profile, f"from {path}"
    return asyncio.run(measure(config, report)), f"measured at start, because of {path}: {why}"


def _write(out: Path, config: ClusterConfig, options: BenchOptions, profile: Profile, outcome: Outcome) -> None:
    """Records of each policy (JSONL), the configuration that ran with every default spelled out, and the summary."""
    out.mkdir(parents=True, exist_ok=True)
    for policy, records in outcome.records.items():
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        (out / f"{policy.value}.records.jsonl").write_bytes(lines)
    ran = {"cluster": config, "options": options, "profile": profile}
    for name, value in (("config.json", ran), ("summary.json", outcome.result)):
        (out / name).write_bytes(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2) + b"\n")


def _print(result: BenchResult, options: BenchOptions) -> None:
    out = Console()
    runs = result.runs
    base = next(iter(runs.values()))
    title = f"{base.requests} requests of {base.agents} agents under each policy"
    if options.rate is not None:
        title = f"{options.rate:g} agents/s"
    elif result.capacity_aps:
        title = "as many agents/s as keep the limits"
    table = Table(title=f"{base.nodes}: {title}", box=SIMPLE, padding=(0, 1, 0, 0), collapse_padding=True)
    table.add_column("policy")
    columns = ["JCT", "speed-up", "read", "TTFT", "TTST", "TPOT", "by P", "by D", "max/avg"]
    for name in [*columns, "agents/s"] if result.capacity_aps else columns:
        table.add_column(name, justify="right", no_wrap=True)
    for policy, run in runs.items():
        read = {role: sum(n.snic_write_bytes for n in run.node if n.role is role) for role in Role}
        row = [
            policy.value,
            f"{run.jct_s:.1f} s",
            f"{base.jct_s / run.jct_s:.2f}x" if run.jct_s else "",
            f"{run.read_s.mean:.2f} s",
            f"{run.ttft_s.mean:.2f} s",
            f"{run.ttst_s.mean:.2f} s",
            f"{run.tpot_s.mean * 1e3:.0f} ms",
            f"{read[Role.PREFILL] / 1e6:.0f} MB",
            f"{read[Role.DECODE] / 1e6:.0f} MB",
            f"{run.snic_max_over_avg:.2f}",
        ]
        if result.capacity_aps:
            row.append(f"{result.capacity_aps[policy]:.3g}")
        table.add_row(*row)
    out.print(table)
    out.print(
        "Means over requests. read: until the last hit block is verified; by P, by D: read from storage by prefill and "
        "by decode nodes; max/avg: of the storage NICs' bytes under load.",
        soft_wrap=True,
        highlight=False,
    )
    shares = [f"{p.value} {run.argmax_agreement.share:.2%}" for p, run in runs.items() if run.argmax_agreement]
    out.print(f"The model says the same as under {options.policies[0].value}: {', '.join(shares)}.", highlight=False)
    for policy, run in runs.items():
        out.print(f"Bottleneck of {policy.value}: {run.bottleneck}.", soft_wrap=True, highlight=False)
        if run.argmax_agreement and run.argmax_agreement.differ:
            out.print(
                f"{policy.value}: {run.argmax_agreement.differ} tokens differ from {options.policies[0].value}'s with "
                "a margin that no rounding explains: this is a bug, please report it",
                soft_wrap=True,
                highlight=False,
            )
    if result.emulated:
        rates = sorted(set(result.emulated.values()))
        links = ", ".join(f"{format_size(rate)}/s" for rate in rates)
        out.print(f"Emulated links: {links} ({len(result.emulated)} directions).", highlight=False)
    for reason, number in result.skipped.items():
        out.print(f"Not replayed: {reason}: {number}.", soft_wrap=True, highlight=False)
    if result.dropped_writes:
        out.print(f"{result.dropped_writes} full blocks could not be stored; later turns computed them again.")
