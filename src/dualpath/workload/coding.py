"""Coding agents with real text: their tool outputs are source files of Python's own standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path

from dualpath.types import BadInputError, Trajectory, Turn

_SYSTEM = "You are a careful programmer. You read code with tools and answer in one short sentence."
_FILES = (
    "argparse.py", "ast.py", "bisect.py", "calendar.py", "cmd.py", "configparser.py", "contextlib.py", "copy.py",
    "csv.py", "dataclasses.py", "difflib.py", "fileinput.py", "fractions.py", "functools.py", "glob.py", "gzip.py",
    "heapq.py", "inspect.py", "ipaddress.py", "locale.py", "mailbox.py", "nntplib.py", "optparse.py", "pathlib.py",
    "pprint.py", "queue.py", "random.py", "shlex.py", "statistics.py", "string.py", "textwrap.py", "tokenize.py",
)  # fmt: skip


def coding_agents(
    encode: Callable[[str], list[int]],
    agents: int,
    turns: int,
    append: int,
    generate: int,
    first: tuple[int, int],
) -> list[Trajectory]:
    """`agents` trajectories of one warm-up turn and `turns` further turns.

    The warm-up turn's prompt holds between `first[0]` and `first[1]` tokens, spread evenly over the agents; each
    further turn appends exactly `append` tokens of tool output and generates `generate`. Each agent reads files of
    its own, so nothing is shared between agents. Raises BadInputError when a count is below 1."""
    for name, value in (("agents", agents), ("turns", turns), ("append", append), ("generate", generate)):
        if value < 1:
            raise BadInputError(f"--{name} is {value}, at least 1 is needed")
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [library / name for name in _FILES if (library / name).is_file()]
    if not files:
        raise BadInputError(f"no source files of the standard library in {library}")
    low, high = first
    trajectories = []
    for agent in range(agents):
        length = low + (high - low) * agent // max(agents - 1, 1)
        tokens = _tokens(encode, files, agent, length + turns * append)
        cuts = [tokens[length + k * append : length + (k + 1) * append] for k in range(turns)]
        opening = Turn(tuple(tokens[:length]), generate)
        rest = (Turn(tuple(cut), generate) for cut in cuts)
        trajectories.append(Trajectory(f"agent-{agent}", (opening, *rest)))
    return trajectories


def _tokens(encode: Callable[[str], list[int]], files: list[Path], agent: int, count: int) -> list[int]:
    """At least `count` tokens of what agent number `agent` reads, cut to `count`."""
    tokens = encode(f"<|im_start|>system\n{_SYSTEM} You are agent {agent}.<|im_end|>\n<|im_start|>user\n")
    index = agent
    while len(tokens) < count:
        path = files[index % len(files)]
        # A few thousand characters at a time: tokenizing a whole module for its head would be most of the work.
        text = path.read_text(encoding="utf-8")
        start = 2000 * (index // len(files))
        tokens += encode(f"$ cat {path.name}\n{text[start : start + 12_000]}\n")
        index += 7
    return tokens[:count]
