"""Describe the machines of `rlhf plan --estimate`: memory, speed and links, from data sheets; nothing is measured here."""

import os
from dataclasses import dataclass

from rlhf_core.config.runtime import RuntimeConfig
from rlhf_core.errors import ConfigError, nearest

CONTEXT = 2e9
"""Bytes of a GPU that each process takes beside tensors: the CUDA context, cuBLAS and NCCL. An allowance, not measured."""
MFU = 0.4
"""Share of the peak that matrix products reach in training: 38 to 43 % in arXiv 2407.21783, table 4, on H100s. Short rows
and padding lower it."""
PCIE = 25e9
"""Bytes a second between a GPU and its host in one direction: PCIe 4.0 with 16 lanes has 32e9."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of GPU, and the nodes that hold it."""

    name: str
    memory: float
    """Bytes of a GPU."""
    flops: float
    """Dense bfloat16 operations a second, at peak."""
    bandwidth: float
    """Bytes a second that a GPU reads from its memory, at peak."""
    link: float
    """Bytes a second from a GPU to others of its node, in one direction."""
    network: float
    """Bytes a second from a GPU to other nodes."""
    per_node: int
    host: float
    """Bytes of host memory of a node."""


HARDWARE = {
    # NVIDIA H100 Tensor Core GPU data sheet (SXM): 80 GB, 989 TFLOPS, 3.35 TB/s, NVLink 900 GB/s both ways; DGX H100: 8
    # GPUs, 8 x 400 Gb/s, 2 TB.
    "h100": Hardware("h100", 80e9, 989e12, 3.35e12, 450e9, 50e9, 8, 2e12),
    # NVIDIA H200 data sheet: 141 GB, 4.8 TB/s; otherwise as H100.
    "h200": Hardware("h200", 141e9, 989e12, 4.8e12, 450e9, 50e9, 8, 2e12),
    # NVIDIA A100 80GB data sheet (SXM): 312 TFLOPS, 2.039 TB/s, NVLink 600 GB/s both ways; DGX A100: 8 x 200 Gb/s, 2 TB.
    "a100-80g": Hardware("a100-80g", 80e9, 312e12, 2.039e12, 300e9, 25e9, 8, 2e12),
}
CPU = "cpu"
CPU_FLOPS, CPU_BANDWIDTH = 5e10, 1e10
"""Of one core, float32, with AVX-512 or AVX2 (32 operations a cycle at 2 to 3 GHz, of which products reach about half)."""


def hardware_of(name: str, runtime: RuntimeConfig) -> Hardware:
    """Return the hardware called `name`; "" is h100, or this machine's processors where the profile uses no GPUs.

    Raises ConfigError for an unknown name, and for GPUs where the profile uses none.
    """
    uses_gpus = runtime.gpus_per_train_worker > 0 or runtime.gpus_per_engine > 0
    name = name or ("h100" if uses_gpus else CPU)
    if name not in (*HARDWARE, CPU):
        raise ConfigError("--on", name, "no such hardware", nearest(name, [*HARDWARE, CPU]))
    if (name == CPU) == uses_gpus:
        rule = f"the profile {'uses' if uses_gpus else 'uses no'} GPUs (runtime.gpus_per_train_worker)"
        raise ConfigError("--on", name, rule, "leave --on out, or change that key")
    return HARDWARE[name] if uses_gpus else this_machine()


def this_machine() -> Hardware:
    """Return the processors and the memory of this machine, as one node whose workers share everything."""
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    cores = len(os.sched_getaffinity(0))
    return Hardware(CPU, memory, CPU_FLOPS * cores, CPU_BANDWIDTH, CPU_BANDWIDTH, CPU_BANDWIDTH, 1 << 20, memory)
