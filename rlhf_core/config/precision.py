"""Choose the precision of computations: `auto` is the fastest one that the processor multiplies natively."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

CPU_INFO = Path("/proc/cpuinfo")
NATIVE_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags of processors that multiply bfloat16: AVX-512, AMX and Arm."""


@cache
def multiplies_bfloat16(cpu_info: Path = CPU_INFO) -> bool:
    """Return whether this machine's processor multiplies bfloat16 natively; False where the system does not say."""
    try:
        lines = cpu_info.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return False
    flags = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return not NATIVE_BFLOAT16.isdisjoint(next(flags, []))


def native_dtype(value: Any) -> Any:
    """Return the precision that `auto` means on this machine, and anything else as it is.

    >>> native_dtype("float32")
    'float32'
    """
    if value != "auto":
        return value
    return "bfloat16" if multiplies_bfloat16() else "float32"


def dtype_of_gpus(table: Any, gpus: Any) -> Any:
    """Return `table` with bfloat16 for a `dtype` of `auto` if it computes on GPUs, whatever processor plans the run.

    `gpus` is a number as it is written, perhaps as text; validation refuses what is none.

    >>> dtype_of_gpus({"dtype": "auto"}, "0.5")
    {'dtype': 'bfloat16'}
    """
    try:
        uses = float(gpus or 0) > 0
    except (TypeError, ValueError):
        uses = False
    if isinstance(table, Mapping) and table.get("dtype") == "auto" and uses:
        return {**table, "dtype": "bfloat16"}
    return table


Precision = Literal["float32", "bfloat16"]
DType = Annotated[
    Precision, BeforeValidator(native_dtype, json_schema_input_type=Literal["auto", "float32", "bfloat16"])
]
"""Precision; `auto` is replaced when the configuration is read, so plans and keys have the precision itself."""
