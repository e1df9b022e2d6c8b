"""Write a safetensors file weight by weight."""

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the format, in the order of a file's weights: larger elements first, so that each is aligned."""
ALIGNMENT = 8
"""Bytes: the header is padded with spaces to a multiple of it."""


class WeightFile(closing["WeightFile"]):
    """A safetensors file with the bytes of `safetensors.torch.save_file`, whose weights come one at a time, in any order.

    `weights` have the dtypes and shapes (meta tensors). Leave it (`with`) when all are written.
    """

    def __init__(self, path: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        super().__init__(self)
        order = list(DTYPES)
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        self._begins: dict[str, int] = {}
        end = 0
        for name in sorted(weights, key=lambda name: (order.index(weights[name].dtype), name)):
            weight = weights[name]
            begin, end = end, end + weight.numel() * weight.element_size()
            header[name] = {"dtype": DTYPES[weight.dtype], "shape": list(weight.shape), "data_offsets": [begin, end]}
            self._begins[name] = begin
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        self._data = 8 + len(text)  # after the length of the header, 64 bits
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, weight: Tensor) -> None:
        """Write `weight`, of the dtype and shape that were given for `name`."""
        self._file.seek(self._data + self._begins[name])
        self._file.write(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        self._file.close()
