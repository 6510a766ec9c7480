"""What a job needs on each node, and how many nodes: GPUs or a part of one, CPUs, memory, disk, as ranges.

`4` is exactly 4, `2..4` between, `4+` or `4..` at least. Bounds are of this format, not of a cluster.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from shoal.spec.error_text import show
from shoal.spec.quantity import BYTES_PATTERN, NUMBER, format_bytes, parse_bytes, parse_number, parse_whole
from shoal.spec.text import NAME_PATTERN, ShortForms, text_schema, writable

MAX_NODES = 100_000
MAX_GPUS = 1024
MIN_SHARE, MAX_SHARE = 0.01, 0.99
SHARES = tuple(hundredths / 100 for hundredths in range(1, 100))
"""Parts of one GPU: in steps of a hundredth."""
MIN_CPUS, MAX_CPUS = 0.01, 100_000.0
MIN_BYTES, MAX_BYTES = 1 << 20, 1 << 60
KIND_PATTERN = r"[A-Za-z][A-Za-z0-9._-]{0,62}(?:\|[A-Za-z][A-Za-z0-9._-]{0,62}){0,7}"
"""One kind of GPU, or several of which any will do: `A100|H100`."""

FROZEN = ConfigDict(frozen=True, extra="forbid", defer_build=True)
"""Config for parts of a job. Their validators are built when used alone, and otherwise only as part of the
job's.
"""


class Range(BaseModel):
    """A lower and an optional upper end, in order."""

    model_config = FROZEN

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        low, high = self.__dict__["min"], self.__dict__["max"]
        if high is not None and high < low:
            raise ValueError(
                f"ends at {show(high)}, below its start {show(low)}; write the smaller one first"
            )
        return self


class NodeRange(Range):
    """How many nodes. Both ends are needed: an open end would take the whole cluster."""

    min: Annotated[int, Field(strict=True, ge=1, le=MAX_NODES)]
    max: Annotated[int, Field(strict=True, ge=1, le=MAX_NODES)]


class CpuRange(Range):
    """CPUs on each node, in fractions if wanted. Without `max`: at least `min`."""

    min: Annotated[float, Field(strict=True, ge=MIN_CPUS, le=MAX_CPUS, allow_inf_nan=False)]
    max: Annotated[float, Field(strict=True, ge=MIN_CPUS, le=MAX_CPUS, allow_inf_nan=False)] | None = None


def _bounded(
    value: object, amount: float, low: float, high: float, format_bound: Callable[[Any], str]
) -> None:
    if amount < low:
        raise ValueError(f"{show(value)} is below the least, {format_bound(low)}")
    if amount > high:
        raise ValueError(f"{show(value)} is above the most, {format_bound(high)}")


def _read_bytes(value: object) -> int:
    amount = parse_bytes(value)
    if 0 < amount < 1024:
        raise ValueError(
            f"{show(value)} is {amount} bytes, below the least, 1MiB; write a unit, such as `{amount}GB`"
        )
    _bounded(value, amount, MIN_BYTES, MAX_BYTES, format_bytes)
    return amount


def _read_whole_nodes(value: object) -> int:
    count = parse_whole(value)
    _bounded(value, count, 1, MAX_NODES, "{:,}".format)
    return count


def _read_cpus(value: object) -> float:
    count = parse_number(value)
    _bounded(value, count, MIN_CPUS, MAX_CPUS, "{:,g}".format)
    return count


_Bytes = Annotated[
    int,
    Field(strict=True, ge=MIN_BYTES, le=MAX_BYTES),
    ShortForms(_read_bytes, (text_schema(BYTES_PATTERN, "32GB"),)),
]


class ByteRange(Range):
    """Bytes on each node. Without `max`: at least `min`."""

    min: _Bytes
    max: _Bytes | None = None


def read_range(value: object, read_one: Callable[[object], Any], example: str) -> object:
    """Read `2..4`, `2..`, `2+` or one amount as `{min, max}`. A mapping or a range is returned unchanged."""
    if isinstance(value, Mapping | Range):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        amount = read_one(value)
        return {"min": amount, "max": amount}
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{show(value)} is not a range such as `{example}`")
    written = value.strip()
    if written.endswith("+"):
        low, high = written[:-1], ""
    elif ".." in written:
        low, _, high = written.partition("..")
    else:
        low = high = written
    if not low:
        raise ValueError(f"{show(value)} has no lower end; write a range such as `{example}`")
    return {"min": read_one(low), "max": read_one(high) if high else None}


def _read_nodes(value: object) -> object:
    node_range = read_range(value, _read_whole_nodes, "2..4")
    if isinstance(node_range, dict) and "max" in node_range and node_range["max"] is None:
        raise ValueError(f"{show(value)} has no upper end; write one, such as `2..4`")
    return node_range


def _read_cpu_range(value: object) -> object:
    return read_range(value, _read_cpus, "4+")


def _read_byte_range(value: object) -> object:
    return read_range(value, _read_bytes, "32GB..")


def _either_end(amount: str) -> str:
    return rf"(?:{amount})(?:\+|\.\.(?:{amount})?)?"


Nodes = Annotated[
    NodeRange,
    ShortForms(
        _read_nodes,
        (
            {"type": "integer", "minimum": 1, "maximum": MAX_NODES},
            text_schema(r"[0-9]+(?:\.\.[0-9]+)?", "2..4"),
        ),
    ),
]
Cpus = Annotated[
    CpuRange,
    ShortForms(
        _read_cpu_range,
        (
            {"type": "number", "minimum": MIN_CPUS, "maximum": MAX_CPUS},
            text_schema(_either_end(NUMBER), "4", "4+", "4..8"),
        ),
    ),
]
Bytes = Annotated[
    ByteRange,
    ShortForms(
        _read_byte_range,
        (
            {"type": "integer", "minimum": MIN_BYTES, "maximum": MAX_BYTES},
            text_schema(_either_end(BYTES_PATTERN), "32GB", "32GB..", "512MiB..1GiB"),
        ),
    ),
]


def _hundredths(share: float) -> float:
    return _read_share(share, str(share))


_Share = Annotated[
    float,
    Field(strict=True, ge=MIN_SHARE, le=MAX_SHARE, json_schema_extra={"enum": list(SHARES)}),
    AfterValidator(_hundredths),
]


_SLICE = re.compile(r"[0-9]+g\.[0-9]+gb")
"""The profile in the name of a MIG slice, as NVIDIA writes it: `H100-1g.10gb`."""


class GpuSpec(BaseModel):
    """GPUs on each node. Without `kind`, any kind; `A100|H100` accepts either. With `share`, a part of a
    single GPU.
    """

    model_config = FROZEN

    kind: Annotated[str, Field(strict=True, pattern=f"^{KIND_PATTERN}$")] | None = None
    count: Annotated[int, Field(strict=True, ge=1, le=MAX_GPUS)] = 1
    share: _Share | None = None

    @model_validator(mode="after")
    def _shares_one(self) -> Self:
        if self.share is not None and self.count > 1:
            raise ValueError(f"has a `share` of {self.count} GPUs; only a single GPU can be shared")
        kinds = self.kind.split("|") if self.kind else []
        slices = [kind for kind in kinds if _SLICE.search(kind)]
        if slices and self.share is not None:
            raise ValueError(
                f"has a `share` of {show(slices[0])}, a slice, which is only given whole; leave it out"
            )
        if slices and len(slices) < len(kinds):
            raise ValueError(f"has {show(slices[0])}, a slice, beside whole GPUs; ask for one or the other")
        return self


_GPUS = re.compile(
    rf"(?:(?P<kind>{KIND_PATTERN})(?::|$))?(?:(?P<count>[0-9]{{1,18}})|(?P<share>[0-9]\.[0-9]{{1,18}}))?"
)


def _read_gpus(value: object) -> object:
    """Read `H100:8`, `H100` (one), `8` (of any kind), `0.5` or `H100:0.5` (of one). `0` is none."""
    if value is None or isinstance(value, Mapping | GpuSpec):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        kind, count = None, value
    elif isinstance(value, float):
        return {"share": _read_share(value, str(value))}
    else:
        match = _GPUS.fullmatch(value.strip()) if isinstance(value, str) and value.strip() else None
        if match is None or (match["kind"] and str(value).strip().endswith(":")):
            raise ValueError(f"{show(value)} is not GPUs such as `H100:8`, `H100`, `8` or `0.5`")
        if match["share"]:
            return {"kind": match["kind"], "share": _read_share(value, match["share"])}
        kind, count = match["kind"], int(match["count"] or 1)
    if count == 0 and kind is None:
        return None
    _bounded(value, count, 1, MAX_GPUS, "{:,} on a node".format)
    return {"kind": kind, "count": count}


def _read_share(value: object, written: str) -> float:
    """A part of one GPU, as the written decimals: 0.29 * 100 is no whole number for a float."""
    share = Decimal(written)
    if not share.is_finite() or not 0 < share < 1:
        raise ValueError(
            f"{show(value)} is not GPUs: whole ones have no decimals, as in `2`, and a part is below 1"
        )
    if share * 100 % 1:
        raise ValueError(f"{show(value)} is not in hundredths of a GPU; write `0.25` or `0.5`")
    return float(share)


_SHARE = r"0\.(?:0[1-9]|[1-9][0-9]?)"

Gpus = Annotated[
    GpuSpec | None,
    ShortForms(
        _read_gpus,
        (
            {"type": "integer", "minimum": 0, "maximum": MAX_GPUS},
            {"type": "number", "enum": list(SHARES)},
            text_schema(
                rf"{KIND_PATTERN}(?::(?:[1-9][0-9]*|{_SHARE}))?|[0-9]+|{_SHARE}",
                *("H100:8", "H100", "8", "0.5", "H100:0.25"),
            ),
        ),
    ),
]


def _read_switch(value: object) -> object:
    """`true` and `false`, also as text."""
    values = {"true": True, "false": False}
    return values.get(value.strip().lower(), value) if isinstance(value, str) else value


Switch = Annotated[bool, Field(strict=True), ShortForms(_read_switch, (text_schema("true|false", "true"),))]


LABEL_PATTERN = r"^[A-Za-z][A-Za-z0-9._/-]*$"


def _read_labels(value: object) -> object:
    """Read whole numbers as text, because a label has no other kind of value."""
    if not isinstance(value, Mapping):
        return value
    return {name: str(label) if type(label) is int else label for name, label in value.items()}


NodeNames = Annotated[
    tuple[Annotated[str, Field(strict=True, min_length=1, max_length=128, pattern=NAME_PATTERN)], ...],
    Field(max_length=1000),
]
Labels = Annotated[
    dict[
        Annotated[str, Field(strict=True, max_length=63, pattern=LABEL_PATTERN)],
        Annotated[str, Field(strict=True, min_length=1, max_length=255), AfterValidator(writable)],
    ],
    Field(max_length=16),
    ShortForms(_read_labels),
]


class Resources(BaseModel):
    """All but `nodes` are for each node."""

    model_config = FROZEN

    gpus: Gpus = Field(
        default=None,
        description="GPUs on each node: `H100:8`, `8` of any kind, `H100` for one, `0.5` for half of one.",
    )
    nodes: Nodes = Field(
        default=NodeRange.model_construct(min=1, max=1),
        description="How many nodes: `2`, or `2..4` to take as many as are free.",
    )
    cpus: Cpus | None = Field(
        default=None,
        description="CPUs on each node; unset: one for each rank. Of a range, the job gets the lower end.",
    )
    memory: Bytes | None = Field(
        default=None,
        description=(
            "Memory on each node; unset: in proportion to the CPUs or GPUs taken. Of a range, the lower end."
        ),
    )
    disk: Bytes | None = Field(
        default=None,
        description=(
            "Disk on each node: counted when nodes are chosen, not enforced. Of a range, the lower end."
        ),
    )
    exclusive: Switch = Field(
        default=False, description="Whole nodes for this job alone, with everything that they have."
    )
    exclude_nodes: NodeNames = Field(default=(), description="Names of nodes that the job must not use.")
    require: Labels = Field(
        default={}, description="Labels that its nodes must have: `{gpu_memory: 80GB}`, `{pool: a100}`."
    )
