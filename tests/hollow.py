"""Safetensors files of any size that take no room on the disk."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path

from glm_lora.arch.safetensors_header import DTYPE_BYTES


def write_hollow(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """A file with ``tensors`` (name -> dtype, shape) of zeros, as a hole in the file system."""
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)
