"""The table of evidence as a page of documentation.

Pure: the page is returned, not written. A test keeps the copy under `docs/` equal to it.
"""

from __future__ import annotations

from shoal.model.evidence import RULES, Evidence, Source

HEAD = """\
# Evidence

A task whose end is believed too early runs twice. So each kind of evidence has one row in a table, which says
what it allows. Generated from `src/shoal/model/evidence.py`; after a change there type
`SHOAL_GOLDEN=write pytest tests/golden/test_evidence.py` and read the difference.

- Only evidence with `yes` in the column *end* may record the end of a task. Then another task may take its
  place, or the attempt ends and its devices are free. Without it neither happens, however long it takes.
- The check in that column is made in the transaction that records the end.
- *Silence*: what follows if the task stays silent for longer than its fence.
- *Early*: what the evidence counts as while a living node agent may still be about to report.
- `queued` breaks no silence of a task that takes the place of a lost one, because the others wait for it.
- *Stops*: the rest of the attempt is stopped if no other task could take the place in time.
"""

SOURCES = {
    Source.NODE: "a process on the node, or an engine that looks at the node's processes itself",
    Source.CLUSTER: "Slurm or Ray alone, which may have lost the node from sight",
    Source.ENGINE: "the engine's records, with the proof that they rest on",
    Source.LEASES: "the control plane's own clock",
    Source.OPERATOR: "a person, with `shoal nodes declare-dead`",
}


def render_page() -> str:
    return f"{HEAD}\n{_rules()}\n{_sources()}"


def _rules() -> str:
    head = "| evidence | from | end | silence | stops | withdraws | early |"
    return "\n".join([head, "|---" * 7 + "|", *map(_row, Evidence), ""])


def _row(evidence: Evidence) -> str:
    rule = RULES[evidence]
    cells = (
        f"`{evidence}`",
        rule.source,
        rule.end,
        rule.silence,
        "yes" if rule.stops_attempt else "",
        ", ".join(f"`{earlier}`" for earlier in rule.withdraws),
        f"`{evidence.if_early}`" if evidence.if_early is not evidence else "",
    )
    return f"| {' | '.join(cells)} |"


def _sources() -> str:
    rows = [f"| {source} | {description} |" for source, description in SOURCES.items()]
    return "\n".join(["| from | what it is |", "|---|---|", *rows, ""])
