"""GPUs of ranks, decided before CUDA starts: from the environment and the files of the kernel.

The one idea: a host's ranks divide the GPUs that its programs may see, in order and evenly, and
each program gets its part as `CUDA_VISIBLE_DEVICES`. No driver is asked: a process that has asked
CUDA cannot be told any more. It needs the standard library only, as the guard does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
# Where Slurm names the GPUs of a step, or of a job, on a host; it sets VISIBLE itself where it can.
SLURM = "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"
NVIDIA, PCI = "/proc/driver/nvidia", "/sys/bus/pci/devices"
UNKNOWN = "?"


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a part of one (MIG): the name for programs, UUID, PCI bus, NUMA node, model."""

    name: str
    uuid: str = UNKNOWN
    bus: str = UNKNOWN
    numa: str = UNKNOWN
    model: str = ""


class BindingError(Exception):
    """The ranks of a host can't have GPUs as they would have to; the message has the advice."""


def of_host(nvidia: str = NVIDIA, pci: str = PCI) -> list[Gpu]:
    """The GPUs of this host as the kernel module lists them, numbered in the order of the bus."""
    found = []
    try:
        folders = sorted(os.listdir(f"{nvidia}/gpus"))
    except OSError:
        return []
    for number, bus in enumerate(folders):
        text = _text(f"{nvidia}/gpus/{bus}/information")
        uuid = re.search(r"GPU UUID:\s*(\S+)", text)
        model = re.search(r"Model:\s*(.+)", text)
        numa = _text(f"{pci}/{bus.lower()}/numa_node").strip()
        found.append(
            Gpu(
                str(number),
                uuid[1] if uuid else UNKNOWN,
                bus,
                numa if numa.isdigit() else UNKNOWN,  # -1: the host has one node
                model[1].strip() if model else "",
            )
        )
    return found


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def visible(environ: Mapping[str, str], here: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that a program sees; as in CUDA, a name that means none hides all behind it."""
    given = next((environ[v] for v in (VISIBLE, *SLURM) if v in environ), None)
    if given is None:
        return list(here)
    found: list[Gpu] = []
    for name in (word.strip() for word in given.split(",")):
        gpu = _named(name, here)
        if gpu is None:
            break
        found.append(gpu)
    return found


def _named(name: str, here: Sequence[Gpu]) -> Gpu | None:
    """The GPU that a word of `CUDA_VISIBLE_DEVICES` names; None if there is none."""
    if name.isdigit():
        if not here:
            return Gpu(name)
        return here[int(name)] if int(name) < len(here) else None
    parts = re.fullmatch(r"MIG-(GPU-[^/]+)/\d+/\d+", name)  # older names of parts
    if parts is None and name.startswith("MIG-"):
        return Gpu(name, name)
    whole = parts[1] if parts else name
    if not whole.startswith("GPU-"):
        return None
    known = [gpu for gpu in here if gpu.uuid.startswith(whole)]  # a beginning is enough
    if len(known) == 1:
        (gpu,) = known
        return Gpu(name, name if parts else gpu.uuid, gpu.bus, gpu.numa, gpu.model)
    return None if here else Gpu(name, name)


def share(gpus: Sequence[Gpu], local_rank: int, local_size: int, may_share: bool) -> list[Gpu]:
    """The GPUs of one of `local_size` ranks: neighbours, and as many for each; a rest stays unused.

    Raises:
        BindingError: there are fewer than ranks, and these may not share.
    """
    count = len(gpus)
    each = count // local_size
    if each:
        return list(gpus[local_rank * each : (local_rank + 1) * each])
    if not may_share:
        raise BindingError(
            f"{local_size} ranks on this host, and {_counted(count)}: start at most {count} here "
            "(-n, or slots= in the hostfile), or let ranks share GPUs with --share-gpus"
        )
    return [gpus[local_rank * count // local_size]]


def _counted(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def wants(environ: Mapping[str, str]) -> bool:
    """Whether the program's default platform are GPUs, not emulated ones."""
    on_gpus = environ.get("SPMD_PLATFORM", "").strip().lower() in ("cuda", "gpu")
    return on_gpus and environ.get("SPMD_CUDA_DRIVER", "cupy") == "cupy"


def bind(
    environ: dict[str, str],
    local_rank: int,
    local_size: int,
    may_share: bool,
    here: Sequence[Gpu] | None = None,
) -> list[Gpu]:
    """Give a rank its GPUs: put them into `environ`; the list of them.

    A program for CPUs may find GPUs too, but then it is no error if they are too few: it keeps all.

    Raises:
        BindingError: the program is for GPUs, and there are fewer than ranks, or none.
    """
    here = of_host() if here is None else here
    found = visible(environ, here)
    is_wanted = wants(environ)
    if not found:
        if not is_wanted:
            return []
        hidden = next((v for v in (VISIBLE, *SLURM) if v in environ), None)
        if hidden is None:
            return []  # a program that asks for a GPU learns what is missing
        raise BindingError(
            f"{hidden}={environ[hidden]} shows none of the {_counted(len(here))} of this host; "
            "unset it, or name GPUs as nvidia-smi -L does"
        )
    if not is_wanted and len(found) < local_size:
        return []
    mine = share(found, local_rank, local_size, may_share)
    environ[VISIBLE] = ",".join(gpu.name for gpu in mine)
    if any(gpu.name.isdigit() for gpu in mine):
        environ.setdefault(ORDER, "PCI_BUS_ID")  # by which the numbers count
    return mine


# ---- the table ---------------------------------------------------------------------------------


def rows(gpus: Sequence[Gpu]) -> list[list[str]]:
    """GPUs in built-in types, for a message."""
    return [list(astuple(gpu)) for gpu in gpus]


def table(ranks: Mapping[int, tuple[str, Sequence[Sequence[str]], str]]) -> list[str]:
    """Lines for people: by rank its host, its GPUs (`rows`) and its cores; then who shares one."""
    lines = [("rank", "host", "GPU", "UUID", "PCI bus", "NUMA", "cores")]
    users: dict[tuple[str, str], list[int]] = {}
    for rank, (host, gpus, cores) in sorted(ranks.items()):
        for name, uuid, bus, numa, _ in gpus:
            lines.append((str(rank), host, name, uuid, bus, numa, cores))
            users.setdefault((host, name if uuid == UNKNOWN else uuid), []).append(rank)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [
        "  ".join(text.ljust(n) for text, n in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    for (host, gpu), sharing in users.items():
        if len(sharing) > 1:
            names = ", ".join(map(str, sharing))
            shown.append(
                f"warning: ranks {names} share GPU {gpu} of {host}: they take turns, each has only "
                "a part of its memory, and NCCL can't connect them"
            )
    return shown
