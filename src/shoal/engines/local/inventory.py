"""What this machine has (CPUs, memory, disk, and GPUs as NVML lists them), and simulated nodes.

A machine without NVIDIA's driver has no GPUs, which is a remark and not an error: every reason for missing
GPUs is kept in words. Simulated nodes have names, racks and fake GPUs; their ranks are real processes of
this machine.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pynvml

from shoal.engines.refusal import is_name
from shoal.errors import SpecError
from shoal.model.node import Gpu, NodeFacts

MAKERS = frozenset({"nvidia", "tesla", "quadro", "geforce"})
FAMILIES = frozenset({"rtx", "gtx", "gt", "titan"})
"""Words that do not name a device without the next word."""
MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def take_inventory(home: Path, confinement: str) -> NodeFacts:
    """Inspect this machine once. May take a second if a GPU's driver must wake up."""
    gpus, remarks = find_gpus()
    return NodeFacts(
        name=node_name(socket.gethostname()),
        cpus=float(len(os.sched_getaffinity(0))),
        memory_bytes=memory_bytes(),
        disk_bytes=disk_bytes(home),
        gpus=gpus,
        confinement=confinement,
        remarks=remarks,
    )


def node_name(hostname: str) -> str:
    """Return the host's short name as a node's name; `local` if it cannot serve as one."""
    short = hostname.partition(".")[0].lower()
    return short if is_name(short) and not short.startswith("sim-") else "local"


def memory_bytes() -> int:
    """Return the machine's memory, or less if a cgroup around us allows less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in MEMORY_LIMITS:
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def disk_bytes(home: Path) -> int:
    """Return the size of the file system under `home`."""
    stat = os.statvfs(home)
    return stat.f_frsize * stat.f_blocks


def find_gpus() -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return every GPU of this machine, and why there are none or fewer."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), (f"no GPUs: NVML says {error}",)
    try:
        devices = [device for index in range(pynvml.nvmlDeviceGetCount()) for device in _gpus(index)]
    except pynvml.NVMLError as error:
        return (), (f"no GPUs: NVML says {error}",)
    finally:
        pynvml.nvmlShutdown()
    gpus = tuple(gpu for gpu in devices if isinstance(gpu, Gpu))
    remarks = tuple(text for text in devices if isinstance(text, str))
    return gpus, remarks if gpus or remarks else ("no GPUs: the driver lists none",)


def _gpus(index: int) -> list[Gpu | str]:
    """Return one device, or its MIG slices, or why it cannot be used: a broken one must not hide the
    others.
    """
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        minor = _read_if_supported(lambda: int(pynvml.nvmlDeviceGetMinorNumber(handle)))
        slices = _slices(handle)
        if slices is None:
            return [_gpu(handle, index, minor)]
        if not slices:
            return [f"GPU {index} left out: it is in MIG mode and has no slices"]
        return [_gpu(slice_handle, slice_index(index, number), minor) for number, slice_handle in slices]
    except pynvml.NVMLError as error:
        return [f"GPU {index} left out: NVML says {error}"]


def _gpu(handle: object, index: int, minor: int | None) -> Gpu:
    return Gpu(
        index=index,
        kind=gpu_kind(_text(pynvml.nvmlDeviceGetName(handle))),
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        minor=minor,
        memory_bytes=_read_if_supported(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)) or 0,
    )


def _slices(handle: object) -> list[tuple[int, object]] | None:
    """Return the slices of a GPU in MIG mode with their numbers; None if it is used whole."""
    try:
        mode, _ = pynvml.nvmlDeviceGetMigMode(handle)
        if mode != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
        max_slices = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return None
    slices = []
    for number in range(max_slices):
        try:
            slices.append((number, pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)))
        except pynvml.NVMLError_NotFound:
            continue
    return slices


def slice_index(gpu: int, number: int) -> int:
    """Return the index of a slice: after all whole GPUs, and stable while its GPU is divided in the same
    way.
    """
    return (gpu + 1) * 100 + number


def _read_if_supported(read: Callable[[], int]) -> int | None:
    # Devices that share the host's memory (GB10, Jetson) report none of their own.
    try:
        return read()
    except pynvml.NVMLError_NotSupported:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def gpu_kind(product: str) -> str:
    """Return the short name people ask for: `NVIDIA H100 80GB HBM3` is `H100`, `GeForce RTX 4090` is
    `RTX-4090`.

    A MIG slice has its profile behind it: `NVIDIA H100 80GB HBM3 MIG 1g.10gb` is `H100-1g.10gb`.
    """
    product, _, profile = product.partition(" MIG ")
    if profile:
        return f"{gpu_kind(product)}-{profile.strip()}"
    parts = [word for word in re.split(r"[\s-]+", product) if word and word.lower() not in MAKERS]
    if not parts:
        return product or "unknown"
    if parts[0].lower() in FAMILIES and len(parts) > 1:
        return f"{parts[0].upper()}-{parts[1]}"
    return parts[0]


GIB = 1 << 30
NODES_PER_RACK = 4
RACKS_PER_ZONE = 4
MAX_NODES = 10_000
MAX_GPUS = 64
SHAPE = re.compile(r"(?P<nodes>\d{1,6})x(?P<gpus>\d{1,4})(?:x(?P<kind>[A-Za-z][A-Za-z0-9-]{0,31}))?")


class SimulatedNodes(msgspec.Struct, frozen=True, kw_only=True):
    """`count` equal nodes. Their resources are simulated; the processes on them are real."""

    count: int
    gpus_per_node: int = 8
    gpu_kind: str = "fake"
    cpus_per_node: float = 8.0
    memory_bytes: int = 64 * GIB
    disk_bytes: int = 100 * GIB
    gpu_memory_bytes: int = 80 * GIB

    @classmethod
    def parse(cls, text: str) -> SimulatedNodes:
        """Parse `16x8` (sixteen nodes of eight GPUs) or `16x8xH100` (GPUs called H100)."""
        shape = SHAPE.fullmatch(text.strip())
        if shape is None:
            raise SpecError(
                f"simulated nodes {text!r} are not written NODESxGPUS or NODESxGPUSxKIND",
                hint="shoal up --demo 16x8",
            )
        count, gpus = int(shape["nodes"]), int(shape["gpus"])
        if not 1 <= count <= MAX_NODES or gpus > MAX_GPUS:
            raise SpecError(
                f"{count} simulated nodes of {gpus} GPUs; possible are 1 to {MAX_NODES} of 0 to {MAX_GPUS}",
                hint="shoal up --demo 16x8",
            )
        return cls(count=count, gpus_per_node=gpus, gpu_kind=shape["kind"] or "fake")

    def facts(self, confinement: str = "") -> list[NodeFacts]:
        """Return the nodes: `sim-01` and so on, four to a rack and four racks to a zone."""
        width = max(2, len(str(self.count)))
        return [self._node(index, f"sim-{index + 1:0{width}d}", confinement) for index in range(self.count)]

    def _node(self, index: int, name: str, confinement: str) -> NodeFacts:
        rack = index // NODES_PER_RACK
        gpus = tuple(
            Gpu(index=i, kind=self.gpu_kind, uuid=f"fake-{name}-{i}", memory_bytes=self.gpu_memory_bytes)
            for i in range(self.gpus_per_node)
        )
        return NodeFacts(
            name=name,
            pool="sim",
            cpus=self.cpus_per_node,
            memory_bytes=self.memory_bytes,
            disk_bytes=self.disk_bytes,
            gpus=gpus,
            is_simulated=True,
            confinement=confinement,
            labels={"zone": f"zone-{rack // RACKS_PER_ZONE + 1}", "rack": f"rack-{rack + 1:02d}"},
        )
