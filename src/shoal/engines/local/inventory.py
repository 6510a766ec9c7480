"""What this machine has: CPUs, memory, disk, and GPUs as NVML lists them.

A machine without NVIDIA's driver has no GPUs, which is a remark and not an error: every reason for
finding nothing is kept in words.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pynvml

from shoal.engines.refusal import is_name
from shoal.model.node import Gpu, NodeFacts

MAKERS = frozenset({"nvidia", "tesla", "quadro", "geforce"})
FAMILIES = frozenset({"rtx", "gtx", "gt", "titan"})
"""Words that do not name a device without the next one."""
MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def take_inventory(home: Path, confinement: str) -> NodeFacts:
    """Look at this machine once. May take a second where a GPU's driver must wake up."""
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
    """The host's short name as a node's name; `local` where it cannot serve as one."""
    short = hostname.partition(".")[0].lower()
    return short if is_name(short) and not short.startswith("sim-") else "local"


def memory_bytes() -> int:
    """The machine's memory, or less where a cgroup around us allows less."""
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
    """The size of the file system under `home`."""
    stat = os.statvfs(home)
    return stat.f_frsize * stat.f_blocks


def find_gpus() -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Every GPU of this machine, and why there are none or fewer."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), (f"no GPUs: NVML says {error}",)
    try:
        found = [one for index in range(pynvml.nvmlDeviceGetCount()) for one in _gpus(index)]
    except pynvml.NVMLError as error:
        return (), (f"no GPUs: NVML says {error}",)
    finally:
        pynvml.nvmlShutdown()
    gpus = tuple(gpu for gpu in found if isinstance(gpu, Gpu))
    remarks = tuple(text for text in found if isinstance(text, str))
    return gpus, remarks if gpus or remarks else ("no GPUs: the driver lists none",)


def _gpus(index: int) -> list[Gpu | str]:
    """One device, or its MIG slices, or why it cannot be used: a broken one must not hide the others."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        minor = _told(lambda: int(pynvml.nvmlDeviceGetMinorNumber(handle)))
        slices = _slices(handle)
        if slices is None:
            return [_gpu(handle, index, minor)]
        if not slices:
            return [f"GPU {index} left out: it is in MIG mode and has no slices"]
        return [_gpu(one, slice_index(index, number), minor) for number, one in slices]
    except pynvml.NVMLError as error:
        return [f"GPU {index} left out: NVML says {error}"]


def _gpu(handle: object, index: int, minor: int | None) -> Gpu:
    return Gpu(
        index=index,
        kind=gpu_kind(_text(pynvml.nvmlDeviceGetName(handle))),
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        minor=minor,
        memory_bytes=_told(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)) or 0,
    )


def _slices(handle: object) -> list[tuple[int, object]] | None:
    """The slices of a GPU in MIG mode with their numbers; None where it is used whole."""
    try:
        mode, _ = pynvml.nvmlDeviceGetMigMode(handle)
        if mode != pynvml.NVML_DEVICE_MIG_ENABLE:
            return None
        most = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return None
    found = []
    for number in range(most):
        try:
            found.append((number, pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)))
        except pynvml.NVMLError_NotFound:
            continue
    return found


def slice_index(gpu: int, number: int) -> int:
    """How a slice is numbered: after all whole GPUs, the same as long as its GPU is cut up alike."""
    return (gpu + 1) * 100 + number


def _told(read: Callable[[], int]) -> int | None:
    # Devices that share the host's memory (GB10, Jetson) have none of their own to tell of.
    try:
        return read()
    except pynvml.NVMLError_NotSupported:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def gpu_kind(product: str) -> str:
    """The short name people ask for: `NVIDIA H100 80GB HBM3` is `H100`, `GeForce RTX 4090` is `RTX-4090`.

    A MIG slice has its profile behind it: `NVIDIA H100 80GB HBM3 MIG 1g.10gb` is `H100-1g.10gb`.
    """
    product, _, profile = product.partition(" MIG ")
    if profile:
        return f"{gpu_kind(product)}-{profile.strip()}"
    words = [word for word in re.split(r"[\s-]+", product) if word and word.lower() not in MAKERS]
    if not words:
        return product or "unknown"
    if words[0].lower() in FAMILIES and len(words) > 1:
        return f"{words[0].upper()}-{words[1]}"
    return words[0]
