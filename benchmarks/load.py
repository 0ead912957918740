"""The second path at loads that both can bear: `python -m benchmarks.load` (about 20 minutes).

On examples/clusters/1p1d.toml, online: the capacity of `dualpath` under an SLO of this machine's size; then its mean
read time at 20 % and at 80 % of that (at most 1.5 x), and TTST and TPOT of `dualpath` beside those of `basic` at 20 %,
in interleaved pairs (within 5 %).
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.clusters import bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", help="default: the trace that is shipped")
    parser.add_argument("--capacity", type=float, help="agents/s, where it is known already")
    parser.add_argument("--agents", type=int, default=6, help="of a run at 20 %% of the capacity")
    parser.add_argument("--pairs", type=int, default=1)
    given = parser.parse_args()
    options = ["--max-turns", "5", "--no-delays", "--scale-tokens", "1/64"]
    if given.trace:
        options += ["--trace", given.trace]
    slo = ["--slo-ttft", "10s", "--slo-tpot", "500ms", "--time-scale", "0.02"]
    capacity = given.capacity
    if capacity is None:
        capacity = bench("1p1d", [*options, *slo, "--policy", "dualpath", "--find-capacity"])["capacity_aps"][
            "dualpath"
        ]
    print(f"capacity of dualpath, TTFT <= 10 s and TPOT <= 500 ms: {capacity:.3g} agents/s", flush=True)
    # From here on a fixed number of agents, not the stopping rule, ends a run; as many at each load in the same time.
    fixed = [*options, "--slo-ttft", "1000s"]
    ratios: dict[str, list[float]] = {"ttst_s": [], "tpot_s": []}
    reads: dict[float, list[float]] = {0.2: [], 0.8: []}
    for pair in range(given.pairs):
        seed = ["--seed", str(pair)]
        few = [*seed, "--sessions", str(given.agents), "--rate", str(0.2 * capacity)]
        many = [*seed, "--sessions", str(4 * given.agents), "--rate", str(0.8 * capacity)]
        low = bench("1p1d", [*fixed, *few, "--policy", "basic,dualpath"])
        high = bench("1p1d", [*fixed, *many, "--policy", "dualpath"])
        reads[0.2].append(low["runs"]["dualpath"]["read_s"]["mean"])
        reads[0.8].append(high["runs"]["dualpath"]["read_s"]["mean"])
        for key, found in ratios.items():
            found.append(low["runs"]["dualpath"][key]["mean"] / low["runs"]["basic"][key]["mean"])
    for share, times in reads.items():
        print(
            f"mean read time at {share:.0%}: {statistics.median(times):.2f} s ({', '.join(f'{t:.2f}' for t in times)})"
        )
    print(f"ratio: {statistics.median(reads[0.8]) / statistics.median(reads[0.2]):.2f}")
    for key, found in ratios.items():
        each = ", ".join(f"{ratio:.3f}" for ratio in found)
        print(f"{key}, dualpath over basic at 20 %: {statistics.median(found):.3f} ({each})")


if __name__ == "__main__":
    main()
