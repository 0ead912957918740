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
from dualpath.cli.common import seed as parse_seed
from dualpath.config import ClusterConfig, load
from dualpath.types import BadInputError, Policy, Role
from dualpath.units import format_size, parse_seconds

if TYPE_CHECKING:
    from dualpath.bench import BenchOptions, BenchResult, PolicyRun
    from dualpath.cluster.model import ServedModel
    from dualpath.cluster.profile import Profile
    from dualpath.cluster.replay import Report


_TIME_SCALES = (1e-6, 1e6)
_LEAST_SCALE = Fraction(1, 4096)


def _number(name: str, value: float, least: float = 0.0, most: float = math.inf) -> float:
    if not 0 < value < math.inf or not least <= value <= most:
        within = "" if most == math.inf else f" from {least:g} to {most:g}" if least else f" and at most {most:g}"
        raise BadInputError(f"--{name} is {value:g}, a finite number above 0{within} is needed")
    return value


def _limit(name: str, text: str) -> float:
    try:
        seconds = parse_seconds(text)
    except BadInputError as error:
        raise BadInputError(f"--{name} {error}") from None
    return _number(name, seconds)


def _scale(text: str) -> Fraction:
    try:
        scale = Fraction(text)
    except (ValueError, ZeroDivisionError):
        scale = Fraction(0)
    if not _LEAST_SCALE <= scale <= 1:
        raise BadInputError(f"--scale-tokens is {text!r}, a fraction from {_LEAST_SCALE} to 1 is needed, such as 1/32")
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
    time_scale: Annotated[
        float | None, typer.Option(help="Factor on tool delays and the stopping rule's windows, 1 by default.")
    ] = None,
    scale_tokens: Annotated[str, typer.Option(help="Factor on all lengths, such as 1/32.")] = "1",
    slo_ttft: Annotated[
        str | None, typer.Option(help="Online: limit of the time to the first token, 4s by default.")
    ] = None,
    slo_tpot: Annotated[
        str | None, typer.Option(help="Online: limit of the time per further token, 50ms by default.")
    ] = None,
    slo_percentile: Annotated[
        float | None, typer.Option(help="Online: percentile of requests that keeps the limits, 50 by default.")
    ] = None,
    no_delays: Annotated[bool, typer.Option("--no-delays", help="Agents do not wait for their tools.")] = False,
    no_store: Annotated[bool, typer.Option("--no-store", help="Keep no KV: every prompt is computed.")] = False,
    warm_up: Annotated[
        bool, typer.Option("--warm-up", help="Each agent's first turn runs before the clock starts.")
    ] = False,
    format: Annotated[str | None, typer.Option(help="The trace's format, where it is not to be detected.")] = None,
    seed: Annotated[
        int | None, typer.Option(parser=parse_seed, metavar="N", help="Online: of the arrivals, 0 by default.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for records, configuration and summary.")] = None,
    json: Json = False,
) -> None:
    """Replay a trace's agents on a cluster, the same work under each policy, compared."""
    chosen = policies(policy, "--policy")
    online = rate is not None or find_capacity
    if rate is not None:
        _number("rate", rate)
    if rate is not None and find_capacity:
        raise BadInputError(f"--rate is {rate:g}, which --find-capacity would search: use one of them")
    for name, value in (
        ("slo-ttft", slo_ttft),
        ("slo-tpot", slo_tpot),
        ("slo-percentile", slo_percentile),
        ("seed", seed),
        ("time-scale", time_scale if no_delays else None),
    ):
        if value is not None and not online:
            raise BadInputError(f"--{name} is {value}, which nothing reads here: it needs --rate or --find-capacity")
    if warm_up and no_store:
        raise BadInputError("--warm-up and --no-store contradict each other: without a store nothing can be warm")
    try:
        from dualpath.bench import Bench, BenchOptions, Slo
        from dualpath.cluster.model import ServedModel, check_memory, model_directory
        from dualpath.cluster.replay import Progress
        from dualpath.models.tokenizer import load_tokenizer
        from dualpath.workload.formats import open_trace
        from dualpath.workload.replay import shipped_trace
    except ModuleNotFoundError as error:
        raise BadInputError(f"bench needs the package {error.name}: install dualpath with its extra 'demo'") from None
    options = BenchOptions(
        policies=chosen,
        rate=rate,
        find_capacity=find_capacity,
        agents=sessions if online else None,
        max_turns=max_turns,
        scale=_scale(scale_tokens),
        time_scale=1.0 if time_scale is None else _number("time-scale", time_scale, *_TIME_SCALES),
        delays=not no_delays,
        warm_up=warm_up,
        store=not no_store,
        slo=Slo(
            _limit("slo-ttft", slo_ttft or "4s"),
            _limit("slo-tpot", slo_tpot or "50ms"),
            50.0 if slo_percentile is None else _number("slo-percentile", slo_percentile, most=100.0),
        ),
        seed=seed or 0,
    )
    config = load(cluster)
    kept = Kept(out) if out is not None else None
    with progress() as report:
        # Before the event loop, where Ctrl-C would wait for a fetch to end.
        directory = model_directory(config.model.path, lambda what: report(Progress("model", note=what)))
        model = ServedModel.open(config)
        source = open_trace(trace or shipped_trace(), format, load_tokenizer(directory).encode)
        # Online the sessions come round again, so the first ones are enough for as many agents.
        first_sessions = list(itertools.islice(source, sessions))
        check_memory(config, model)
        work = Bench(config, model, first_sessions, options, report)  # refuses what cannot run, before it is profiled
        profile, whence = _profile(cluster, config, model, report)
        work.skipped.update(source.skipped)
        _say(f"Profile of this machine: {whence}.")
        if options.store:
            _say(f"Over both paths, reading hits should be bound by: {work.binding(profile)}.")
        result = asyncio.run(work.run(profile, kept.run if kept else lambda run: None))
    if kept:
        kept.summary(options, profile, result)
    if json:
        print_json(result)
    else:
        _print(result, options)
    if any(run.argmax_agreement and run.argmax_agreement.differ for run in result.runs.values()):
        raise typer.Exit(1)


class Kept:
    """The directory of `--out`: the records of each policy (JSONL) as soon as it is through; then the configuration
    that ran, with every default spelled out, and the summary."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._clusters: dict[Policy, ClusterConfig] = {}
        directory.mkdir(parents=True, exist_ok=True)
        self._write(directory / "config.json", {})  # one that cannot be written is found out before the runs

    def run(self, run: PolicyRun) -> None:
        self._clusters[run.policy] = run.config
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in run.records)
        (self._directory / f"{run.policy.value}.records.jsonl").write_bytes(lines)

    def summary(self, options: BenchOptions, profile: Profile, result: BenchResult) -> None:
        ran = {"clusters": self._clusters, "options": options, "profile": profile}
        self._write(self._directory / "config.json", ran)
        self._write(self._directory / "summary.json", result)

    @staticmethod
    def _write(path: Path, value: object) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2) + b"\n")


def _say(text: str) -> None:
    Console(stderr=True).print(text, soft_wrap=True, highlight=False)


def _profile(cluster: Path, config: ClusterConfig, model: ServedModel, report: Report) -> tuple[Profile, str]:
    """The profile beside the cluster file, or one that is measured now; and which of the two it is."""
    from dualpath.cluster.measure_profile import measure
    from dualpath.cluster.profile import default_file, load_profile, matches

    path = default_file(cluster)
    why = "there is no file"
    if path.exists():
        profile = load_profile(path)
        why = matches(profile, config, model.fingerprint.digest())
        if not why:
            return profile, f"from {path}"
    return asyncio.run(measure(config, report)), f"measured at start, because of {path}: {why}"


def _print(result: BenchResult, options: BenchOptions) -> None:
    out = Console()
    runs = result.runs
    base = next(iter(runs.values()))
    title = f"{base.requests} requests of {base.agents} agents under each policy"
    if options.rate is not None:
        title = f"{options.rate:g} agents/s"
    elif result.capacity:
        title = "as many agents/s as keep the limits"
    table = Table(title=f"{base.nodes}: {title}", box=SIMPLE, padding=(0, 1, 0, 0), collapse_padding=True)
    table.add_column("policy", no_wrap=True, min_width=len("pe-scheduled"))
    columns = ["read", "TTFT", "TTST", "TPOT", "P GB", "D GB", "max/avg"]
    columns = [*(["agents/s"] if result.capacity else []), *columns] if result.online else ["JCT", "ratio", *columns]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for policy, run in runs.items():
        read = {role: sum(n.snic_write_bytes for n in run.node if n.role is role) for role in Role}
        row = [
            f"{run.read_s.mean:.2f}",
            f"{run.ttft_s.mean:.2f}",
            f"{run.ttst_s.mean:.2f}",
            f"{run.tpot_s.mean:.3f}",
            f"{read[Role.PREFILL] / 1e9:.2f}",
            f"{read[Role.DECODE] / 1e9:.2f}",
            f"{run.snic_max_over_avg:.2f}",
        ]
        if result.capacity:
            found = result.capacity[policy]
            row.insert(0, f"{found.kept_aps:.3g}" if found.missed_aps else f">= {found.kept_aps:.3g}")
        elif not result.online:
            row = [f"{run.jct_s:.1f}", f"{base.jct_s / run.jct_s:.2f}x" if run.jct_s else "", *row]
        table.add_row(policy.value, *row)
    out.print(table)
    out.print(
        "Seconds, means over requests. ratio: the first policy's JCT over this one's; read: until the last hit block "
        "is verified; P, D: read from storage by prefill and by decode nodes; max/avg: of the storage NICs under load.",
        soft_wrap=True,
        highlight=False,
    )
    shares = [f"{p.value} {run.argmax_agreement.share:.2%}" for p, run in runs.items() if run.argmax_agreement]
    out.print(
        f"The model says the same as under {options.policies[0].value}: {', '.join(shares)}.",
        soft_wrap=True,
        highlight=False,
    )
    for policy, run in runs.items():
        out.print(f"Bottleneck of {policy.value}: {run.bottleneck}.", soft_wrap=True, highlight=False)
        if result.online and not result.capacity:
            (probe,) = result.online[policy]
            kept = "kept" if probe.kept else "not kept"
            out.print(f"{policy.value} at {probe.rate:g}/s: limits {kept}; stopping rule: {probe.verdict}.")
        for name in ("failed", "cancelled", "preempted", "recomputed_blocks"):
            if number := getattr(run, name):
                out.print(f"{policy.value}: {number} {name.replace('_', ' ')}.", highlight=False)
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
