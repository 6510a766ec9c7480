"""Write docs/pictures/architecture.svg: the pieces of Shoal and what they say to each other.

`python scripts/draw_architecture.py` writes the file; with `-` it prints the picture instead. The picture
carries its own background, light or dark by the reader's preference, so it is readable on any page.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "architecture.svg"
WIDTH, HEIGHT = 760, 672
TITLE = "The pieces of Shoal: control plane, engine, nodes with supervisors and ranks, data plane"
STYLE = """
    .page { fill: #ffffff; stroke: #d5dde2; }
    .box { fill: #eef6f8; stroke: #0b6a7d; stroke-width: 1.5; }
    .inner { fill: #ffffff; stroke: #9cbfc8; }
    .rank { fill: #d9edd8; stroke: #4d8a4a; }
    .line { stroke: #47606a; stroke-width: 1.6; fill: none; }
    .head { fill: #47606a; }
    text { font-family: "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif; fill: #12252c; }
    .title { font-size: 17px; font-weight: 600; }
    .name { font-size: 15px; font-weight: 600; }
    .small { font-size: 13.5px; }
    .says { font-size: 13.5px; font-style: italic; fill: #3b525b; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #11191d; stroke: #2b3a41; }
      .box { fill: #16272d; stroke: #4cb3c6; }
      .inner { fill: #1d333b; stroke: #3f6671; }
      .rank { fill: #23402a; stroke: #74b26f; }
      .line { stroke: #a9bcc4; }
      .head { fill: #a9bcc4; }
      text { fill: #e8f0f2; }
      .says { fill: #b6c8ce; }
    }
"""


def rect(kind: str, x: int, y: int, width: int, height: int) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>'


def text(kind: str, x: int, y: int, words: str, *, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def panel(kind: str, x: int, y: int, width: int, height: int, *lines: str) -> list[str]:
    """A box whose first line is its name."""
    first = "title" if kind == "box" else "name"
    kinds = [first] + ["small"] * (len(lines) - 1)
    texts = [
        text(k, x + 14, y + 25 + 20 * row, line)
        for row, (k, line) in enumerate(zip(kinds, lines, strict=True))
    ]
    return [rect(kind, x, y, width, height), *texts]


def arrow(x1: int, y1: int, x2: int, y2: int, *, both: bool = False) -> str:
    start = ' marker-start="url(#head)"' if both else ""
    return f'<line class="line" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"{start} marker-end="url(#head)"/>'


def people() -> list[str]:
    return [
        *panel("box", 20, 20, 420, 66, "People and programs", "shoal command · Python SDK · HTTP API"),
        *panel("box", 530, 20, 210, 66, "Callers of services", "HTTP and OpenAI clients"),
        arrow(150, 86, 150, 134),
        text("says", 162, 115, "jobs, services, questions"),
        arrow(635, 86, 635, 134),
        text("says", 647, 115, "requests"),
    ]


def planes() -> list[str]:
    return [
        *panel("box", 20, 138, 420, 190, "Control plane"),
        *panel("inner", 34, 176, 190, 64, "API", "tokens, roles, audit"),
        *panel("inner", 236, 176, 190, 64, "Scheduler", "starts, promises, reasons"),
        *panel("inner", 34, 252, 190, 64, "Loops", "place, watch, heal, serve"),
        *panel("inner", 236, 252, 190, 64, "Store", "SQLite or PostgreSQL"),
        *panel(
            "box",
            530,
            138,
            210,
            190,
            "Data plane",
            "load balancer",
            "limits for each caller",
            "fair queue, retries",
            "counts the load",
        ),
        arrow(444, 220, 526, 220, both=True),
        text("says", 485, 210, "replicas", anchor="middle"),
        text("says", 485, 240, "load", anchor="middle"),
    ]


def engine() -> list[str]:
    return [
        arrow(120, 328, 120, 372),
        text("says", 132, 355, "start, list, stop"),
        *panel("box", 20, 376, 270, 66, "Engine", "this machine · Slurm · Ray"),
        arrow(120, 442, 120, 486),
        text("says", 132, 469, "one supervisor for each node"),
        arrow(350, 486, 350, 332),
        text("says", 362, 386, "heartbeats,"),
        text("says", 362, 406, "logs, metrics,"),
        text("says", 362, 426, "outcomes"),
    ]


def nodes() -> list[str]:
    ranks = [
        part
        for at, name in enumerate(("rank 0", "rank 1", "rank 2", "rank 3"))
        for part in rank(46 + 80 * at, name)
    ]
    return [
        *panel("box", 20, 490, 350, 162, "Node"),
        *panel("inner", 34, 524, 322, 54, "Supervisor", "limits, restarts, logs, lease"),
        *ranks,
        *panel("box", 390, 490, 350, 162, "Node"),
        *panel("inner", 404, 526, 148, 112, "Supervisor", "limits, logs, lease", "health checks"),
        *panel(
            "rank", 566, 526, 160, 112, "Replica", "your HTTP server;", "a TLS sidecar", "on other machines"
        ),
        arrow(635, 328, 635, 522),
        text("says", 625, 400, "requests", anchor="end"),
    ]


def rank(x: int, name: str) -> list[str]:
    return [
        f'<line class="line" x1="{x + 29}" y1="578" x2="{x + 29}" y2="590"/>',
        rect("rank", x - 8, 590, 74, 50),
        text("name", x + 29, 611, name, anchor="middle"),
        text("small", x + 29, 630, "GPU", anchor="middle"),
    ]


def picture() -> str:
    head = (
        '<defs><marker id="head" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7"'
        ' orient="auto-start-reverse"><path class="head" d="M0 0L10 5L0 10z"/></marker></defs>'
    )
    parts = [
        f"<title>{escape(TITLE)}</title>",
        f"<style>{STYLE}  </style>",
        head,
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="12"/>',
        *people(),
        *planes(),
        *engine(),
        *nodes(),
    ]
    body = "\n".join(f"  {part}" for part in parts)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>\n{body}\n</svg>\n'


if __name__ == "__main__":
    if sys.argv[1:] == ["-"]:
        sys.stdout.write(picture())
    else:
        FILE.write_text(picture(), encoding="utf-8")
