"""Alibaba's GPU-sharing cluster of 2023: a list of nodes, and lists of pods that may ask for a part of a GPU.

https://github.com/alibaba/clusterdata (cluster-trace-gpu-v2023) defines the columns.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from shoal.sim.traces.trace import TraceError, malformed, open_text

MILLI = 1000
"""Thousandths in one GPU."""


class GpuNode(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    cpu_milli: int
    memory_mib: int
    num_gpus: int
    model: str | None = None


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """A request for CPU, memory and either whole GPUs, or `gpu_milli` thousandths of one."""

    name: str
    cpu_milli: int
    memory_mib: int
    num_gpus: int = 0
    gpu_milli: int = 0
    """Thousandths of each of its GPUs; 1000 if there are several."""
    models: tuple[str, ...] = ()
    """Accepted models; all if empty."""

    @property
    def total_gpu_milli(self) -> int:
        return self.num_gpus * self.gpu_milli


def read_nodes(path: Path) -> list[GpuNode]:
    """The nodes by name, in order."""
    nodes = [
        GpuNode(
            name=row.text("sn"),
            cpu_milli=row.count("cpu_milli"),
            memory_mib=row.count("memory_mib"),
            num_gpus=row.count("gpu"),
            model=row.optional("model"),
        )
        for row in _rows(path, ("sn", "cpu_milli", "memory_mib", "gpu"))
    ]
    return sorted(nodes, key=lambda node: node.name)


def read_pods(path: Path) -> list[Pod]:
    return [_pod(row) for row in _rows(path, ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"))]


def _pod(row: _Row) -> Pod:
    num_gpus, gpu_milli = row.count("num_gpu"), row.count("gpu_milli")
    if num_gpus and not 0 < gpu_milli <= MILLI:
        raise row.complaint(f"`gpu_milli` is {gpu_milli}; a GPU has {MILLI}")
    if num_gpus > 1 and gpu_milli != MILLI:
        raise row.complaint(f"{num_gpus} GPUs of {gpu_milli} thousandths; only a single GPU can be shared")
    return Pod(
        name=row.text("name"),
        cpu_milli=row.count("cpu_milli"),
        memory_mib=row.count("memory_mib"),
        num_gpus=num_gpus,
        gpu_milli=gpu_milli if num_gpus else 0,
        models=tuple(filter(None, (row.optional("gpu_spec") or "").split("|"))),
    )


class _Row:
    def __init__(self, cells: dict[str, str], complaint: Callable[[str], TraceError]) -> None:
        self._cells = cells
        self.complaint = complaint

    def text(self, column: str) -> str:
        if not self._cells[column]:
            raise self.complaint(f"`{column}` is empty")
        return self._cells[column]

    def optional(self, column: str) -> str | None:
        return self._cells.get(column) or None

    def count(self, column: str) -> int:
        text = self._cells[column]
        if not text.isdecimal():
            raise self.complaint(f"`{column}` cannot be `{text}`")
        return int(text)


def _rows(path: Path, needed: tuple[str, ...]) -> Iterator[_Row]:
    with open_text(path) as lines:
        rows = csv.reader(lines)
        header = next(rows, [])
        absent = [column for column in needed if column not in header]
        if absent:
            raise malformed(path, 1, f"no column `{absent[0]}`; there are {', '.join(header) or 'none'}")
        for cells in rows:
            number = rows.line_num
            if len(cells) != len(header):
                raise malformed(path, number, f"{len(cells)} cells, the header has {len(header)}")
            yield _Row(
                dict(zip(header, cells, strict=True)),
                lambda text, number=number: malformed(path, number, text),  # type: ignore[misc]
            )
