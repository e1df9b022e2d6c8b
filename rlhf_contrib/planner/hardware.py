"""Describe hardware for `rlhf plan --estimate`: memory, speed and links from data sheets; nothing is measured here."""

from dataclasses import dataclass, replace

from rlhf_core.config.runtime import RuntimeConfig
from rlhf_core.errors import ConfigError, nearest
from rlhf_core.runtime.cluster import available_cores, available_memory

CONTEXT = 2e9
"""GPU bytes that each process takes besides tensors: CUDA context, cuBLAS and NCCL. An allowance, not measured."""
COMMUNICATOR = 0.7e9
"""Bytes of a GPU for one more NCCL communicator, over which weights are sent: 544 MB were measured between two A100s, and
688 MB among more (NVIDIA/nccl#964)."""
DECODING = 0.6
"""Fraction of peak bandwidth that an engine reaches when decoding: 55 to 60 % on A100 and H100
(databricks.com/blog/llm-inference-performance-engineering-best-practices, model bandwidth utilization). It is not an
upper bound: one sequence in a compiled loop reaches 90 % on an RTX 4090 (pytorch-labs/gpt-fast#27).
"""
EXPERTS = 0.4
"""Speed of a mixture of experts relative to a dense model: 153 TFLOPS of GPT OSS 120B in bfloat16 on H100 (performance
summary of NVIDIA-NeMo/Megatron-Bridge, 25.11) are 15 % of the peak, which is 40 % of the speed that `mfu` predicts.
"""
GIB = float(1 << 30)


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
    """Bytes a second of NCCL's collectives in a node (`busbw` of all-gather in nccl-tests)."""
    network: float
    """The same between nodes in which each GPU has a network card."""
    card: float
    """Bytes a second of one network card, used when one rank sends to another node."""
    pcie: float
    """Bytes a second between a GPU and its host in one direction."""
    per_node: int
    host: float
    """Bytes of host memory of a node."""
    mfu: float = 0.4
    """Fraction of the peak that matrix products reach in training: 38 to 43 % in arXiv 2407.21783, table 4, on H100s.
    Short rows and padding lower it.
    """


# Links in a node. NVLink: 450 GB/s are 370 in collectives, a fifth less (NVIDIA/nccl-tests#212, on H100); A100's 300 are
# 230 (nccl-tests#149 and #100), and B200's 900 are taken as 740. PCIe 4.0 without NVLink: NCCL's own 10 GB/s across sockets
# (log in nccl-tests#307); PCIe 5.0: 28 GB/s over eight RTX 5090 on two sockets (nccl#1639).
# Between nodes: 340 GB/s in a reduction and 200 in an all-gather over 8 x 400 Gb/s (nccl#1218), 20 GB/s for each card of
# 200 Gb/s (nccl#320). Host and GPU: copies reach 25 of the 32 GB/s of PCIe 4.0 with 16 lanes (A100, NVIDIA/nvbandwidth#42
# and #53), and 53 of the 64 of PCIe 5.0 (H100, nvbandwidth#24).
HARDWARE = {
    # Ada GPU architecture whitepaper, appendix A: 24 GB, 165 TFLOPS with float32 sums, 1.008 TB/s. No NVLink, one 10 Gb/s card.
    "rtx4090": Hardware("rtx4090", 24e9, 165e12, 1.008e12, 10e9, 1e9, 1e9, 25e9, 8, 0.5e12),
    # NVIDIA A100 40GB data sheet (SXM): 312 TFLOPS, 1.555 TB/s; DGX A100 of 40 GB: 1 TB.
    "a100-40g": Hardware("a100-40g", 40e9, 312e12, 1.555e12, 230e9, 160e9, 25e9, 25e9, 8, 1e12, 0.5),
    # NVIDIA A100 80GB data sheet (SXM): 312 TFLOPS, 2.039 TB/s, NVLink 600 GB/s both ways; DGX A100: 8 x 200 Gb/s, 2 TB.
    # Products reach 43 to 52 %, with recomputed activations counted as here (arXiv 2104.04473, table 1).
    "a100": Hardware("a100", 80e9, 312e12, 2.039e12, 230e9, 160e9, 25e9, 25e9, 8, 2e12, 0.5),
    # NVIDIA L40S data sheet: 48 GB, 362 TFLOPS, 864 GB/s, PCIe 4.0.
    "l40s": Hardware("l40s", 48e9, 362e12, 0.864e12, 10e9, 20e9, 25e9, 25e9, 8, 1e12),
    # NVIDIA H100 Tensor Core GPU data sheet (SXM): 80 GB, 989 TFLOPS, 3.35 TB/s, NVLink 900 GB/s both ways; DGX H100: 8
    # GPUs, 8 x 400 Gb/s, 2 TB.
    "h100": Hardware("h100", 80e9, 989e12, 3.35e12, 370e9, 200e9, 50e9, 50e9, 8, 2e12),
    # RTX PRO 6000 Blackwell, Server Edition, data sheet: 96 GB, 1.597 TB/s, PCIe 5.0, and 120 TFLOPS in float32, of which
    # tensor cores do four times as many in bfloat16, as the 126 and 504 of the Workstation Edition show. One large product
    # reaches 417 (zzc0721/torch-performance-test-data#162).
    "rtx6000": Hardware("rtx6000", 96e9, 480e12, 1.597e12, 28e9, 40e9, 50e9, 50e9, 8, 2e12),
    # NVIDIA H200 data sheet: 141 GB, 4.8 TB/s; otherwise as H100.
    "h200": Hardware("h200", 141e9, 989e12, 4.8e12, 370e9, 200e9, 50e9, 50e9, 8, 2e12),
    # DGX B200 data sheet: 8 GPUs with 1,440 GB, 64 TB/s and 18 PFLOPS (dense) in all, NVLink 1.8 TB/s both ways, 2 TB.
    "b200": Hardware("b200", 180e9, 2250e12, 8e12, 740e9, 200e9, 50e9, 50e9, 8, 2e12),
}
HARDWARE["a100-80g"] = replace(HARDWARE["a100"], name="a100-80g")  # the name until 0.11
CPU = "cpu"
CPU_FLOPS, CPU_BANDWIDTH = 5e10, 1e10
"""Speeds of one core: float32 with AVX-512 or AVX2 (32 operations a cycle at 2 to 3 GHz; products reach about half)."""


def hardware_of(name: str, runtime: RuntimeConfig, *, host_gib: float = 0.0) -> Hardware:
    """Look up the hardware called `name`; "" is h100, or this machine's CPUs if the profile uses no GPUs.

    A non-zero `host_gib` replaces the host memory of a node on the data sheet. Raises ConfigError for an unknown name,
    and for GPUs if the profile uses none.
    """
    uses_gpus = runtime.gpus_per_train_worker > 0 or runtime.gpus_per_engine > 0
    name = name or ("h100" if uses_gpus else CPU)
    if name not in (*HARDWARE, CPU):
        raise ConfigError("--on", name, "no such hardware", nearest(name, [*HARDWARE, CPU]))
    if (name == CPU) == uses_gpus:
        rule = f"the profile {'uses' if uses_gpus else 'uses no'} GPUs (runtime.gpus_per_train_worker)"
        raise ConfigError("--on", name, rule, "leave --on out, or change that key")
    if not host_gib:
        return HARDWARE[name] if uses_gpus else this_machine()
    if not uses_gpus:
        raise ConfigError(
            "--host-gib", host_gib, "the profile uses no GPUs, so it has this machine's memory", "leave it out"
        )
    return replace(HARDWARE[name], host=host_gib * GIB)


def this_machine() -> Hardware:
    """The CPUs and memory of this machine, as one node whose workers share everything."""
    cores, memory = available_cores(), available_memory()
    speed = CPU_BANDWIDTH
    return Hardware(CPU, memory, CPU_FLOPS * cores, speed, speed, speed, speed, speed, 1 << 20, memory, 0.5)
