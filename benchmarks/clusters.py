"""Both paths on three clusters of this machine: `python -m benchmarks.clusters` (about 20 minutes).

Runs `dualpath bench` on examples/clusters/{1p1d,1p2d,2p1d}.toml, the same agents under each policy, and prints job
completion times beside what the ratio of storage NICs allows, and the paper's two equalities: Basic on 1P1D is as fast
as Basic on 1P2D, and DualPath on 1P1D as fast as Basic on 2P1D (PAPER.md, "27B by P/D ratio").
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CLUSTERS = Path(__file__).parents[1] / "examples" / "clusters"
NICS = {"1p1d": (1, 2), "1p2d": (1, 3), "2p1d": (2, 3)}
"""Storage NICs that read under basic, and all of them."""


def bench(name: str, options: list[str]) -> dict[str, Any]:
    """The JSON object of one `dualpath bench`."""
    command = [
        sys.executable,
        "-m",
        "dualpath",
        "bench",
        "--cluster",
        str(CLUSTERS / f"{name}.toml"),
        "--json",
        *options,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", help="default: the trace that is shipped")
    parser.add_argument("--sessions", default="8")
    parser.add_argument("--max-turns", default="8")
    parser.add_argument("--scale-tokens", default="1/32")
    parser.add_argument("--policies", default="basic,pe-scheduled,dualpath-rr,dualpath,split")
    given = parser.parse_args()
    options = ["--no-delays", "--warm-up", "--policy", given.policies, "--sessions", given.sessions]
    options += ["--max-turns", given.max_turns, "--scale-tokens", given.scale_tokens]
    if given.trace:
        options += ["--trace", given.trace]
    jct: dict[tuple[str, str], float] = {}
    print("| cluster | policy | JCT | over basic | NICs allow | max/avg | argmax as basic |")
    print("|---|---|---|---|---|---|---|")
    for name, (read, every) in NICS.items():
        for policy, run in bench(name, options)["runs"].items():
            jct[name, policy] = run["jct_s"]
            assert sum(run["tokens_by_source"].values()) == run["prompt_tokens"]
            allowed = every / read if policy in ("dualpath", "dualpath-rr", "split") else 1.0
            same = run["argmax_agreement"]
            print(
                f"| {name.upper()} | {policy} | {run['jct_s']:.1f} s | {jct[name, 'basic'] / run['jct_s']:.2f}x "
                f"| {allowed:.2f}x | {run['snic_max_over_avg']:.2f} | {same['share']:.2%}, {same['differ']} differ |",
                flush=True,
            )
    print(f"\nbasic: 1P2D / 1P1D = {jct['1p2d', 'basic'] / jct['1p1d', 'basic']:.3f}")
    print(f"dualpath 1P1D / basic 2P1D = {jct['1p1d', 'dualpath'] / jct['2p1d', 'basic']:.3f}")


if __name__ == "__main__":
    main()
