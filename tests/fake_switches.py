"""The switches of the fake engine; lies beside ``fake_engine.py``."""

from __future__ import annotations

import argparse
import os

import fake_garbage
import fake_sleep

FAULTS = (
    "die_before_listen", "die_while_loading", "die_after", "hang", "hang_health", "garbage", "garbage_health",
    "unhealthy", "flood_forever",
)  # fmt: skip
"""What ``--cure`` heals."""


def parse_size(text: str) -> int:
    """Bytes of ``100MiB``, ``2GiB``, ``4096``."""
    for unit, factor in (("KiB", 1024), ("MiB", 1024**2), ("GiB", 1024**3)):
        if text.endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    return int(text)


def parse_arguments(description: str | None = None, arguments: list[str] | None = None) -> argparse.Namespace:
    """The switches, cured where ``--cure`` says so; see ``--help``."""
    parser = make_parser(description)
    switches = parser.parse_args(arguments)
    if switches.cure and os.path.exists(switches.cure):
        vars(switches).update({name: parser.get_default(name) for name in FAULTS})
    return switches


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Every switch, with its default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, help="listen on this loopback port; 0 takes a free one")
    parser.add_argument("--socket", help="listen on this Unix socket")
    parser.add_argument("--name", default="fake", help="model name in answers")
    parser.add_argument("--allocate", type=parse_size, default=0, help="bytes of memory to take and touch")
    for switch, way in fake_sleep.WAYS.items():
        told = f"have /sleep and /wake_up, which {fake_sleep.MEANINGS[way]}"
        parser.add_argument(switch, dest="sleep", action="store_const", const=way, help=told)
    parser.add_argument("--mmap", type=parse_size, default=0, help="bytes of a file to map and touch")
    parser.add_argument("--request-bytes", type=parse_size, default=0, help="bytes to take and touch during a request")
    parser.add_argument("--load-seconds", type=float, default=0.0, help="answer 503 on /health for so long")
    parser.add_argument("--load-gate", help="do not listen until somebody opens this fifo for writing")
    parser.add_argument("--unhealthy", action="store_true", help="answer 503 on /health until /control/healthy")
    parser.add_argument("--no-health", action="store_true", help="have no /health: 404, as some servers do")
    parser.add_argument("--ignore-sigterm", action="store_true", help="go on after SIGTERM")
    parser.add_argument("--slow-stop", type=float, default=0.0, metavar="SECONDS", help="end so long after SIGTERM")
    parser.add_argument("--die-before-listen", action="store_true", help="end instead of listening")
    parser.add_argument("--die-while-loading", type=int, metavar="N", help="be unhealthy, and end at the Nth probe")
    parser.add_argument("--cure", metavar="FILE", help="do not die, hang or answer nonsense once this file is there")
    parser.add_argument("--die-after", type=int, metavar="N", help="end in the middle of the Nth answer")
    parser.add_argument("--exit-code", type=int, default=3, help="exit code of every --die-…; -9 kills itself")
    parser.add_argument("--hang", action="store_true", help="accept requests and never answer them")
    parser.add_argument("--hang-health", action="store_true", help="accept health probes and never answer them")
    parser.add_argument("--hold", action="store_true", help="hold requests until /control/release")
    parser.add_argument("--hold-after", type=int, default=0, metavar="N", help="hold them after N tokens of the answer")
    parser.add_argument(
        "--grandchild",
        choices=["plain", "session", "orphan", "hidden"],
        help="start a process that outlives this one: a child, one in its own session, one whose parent has ended, "
        "one that also has an empty environment",
    )
    parser.add_argument("--grandchild-bytes", type=parse_size, default=0, help="bytes that it takes and touches")
    parser.add_argument("--garbage", choices=fake_garbage.CHOICES, help="answer nonsense")
    parser.add_argument("--garbage-health", choices=fake_garbage.CHOICES, help="answer health probes with nonsense")
    parser.add_argument("--flood", type=parse_size, default=0, help="bytes of log lines to print at start")
    parser.add_argument("--flood-line", type=parse_size, default=0, help="bytes without a line end, on both outputs")
    parser.add_argument("--flood-forever", action="store_true", help="print log lines all the time")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of an answer, unless max_tokens is lower")
    parser.add_argument("--tokens-per-second", type=float, help="pace of an answer; none = at once")
    parser.add_argument("--context", type=int, help="refuse prompts of more words, as llama.cpp does")
    return parser
