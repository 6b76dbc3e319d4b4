"""What is written of a tensor is what torch.save writes of it, byte for byte, and every reader of torch has it back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from funshard import _torch
from funshard.checkpoint._files import PIECE_BYTES, checksum, find_record
from funshard.checkpoint._save import write_record

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int64),
)
TENSORS: dict[str, Tensor] = {
    **{str(dtype): (torch.arange(12).view(4, 3) % 5).to(dtype) for dtype in DTYPES},
    "number": torch.tensor(2.0),
    "empty": torch.zeros(0, 3),
    "transposed": torch.arange(20).view(5, 4).t(),
    "channels_last": torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
    "every second": torch.arange(10)[::2],
    "columns": torch.randn(8, 8)[:, 2:4],
    "rows": torch.randn(8, 8)[2:4],
    "one of many": torch.randn(3, 1)[1:2],
    "in pieces": torch.randn(PIECE_BYTES // 4 * 2 + 3),
}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("name", TENSORS)
def test_torch_reads_it(tmp_path: Path, name: str) -> None:
    """Into memory, or mapped; the elements are where `find_record` says, at a multiple of 64 bytes, and nothing else is."""
    tensor = TENSORS[name]
    with (tmp_path / "x").open("wb") as file:
        nbytes, crc32 = write_record(file, tensor)
    raw = (tmp_path / "x").read_bytes()
    assert (nbytes, crc32) == (len(raw), checksum(raw))
    for mmap in (False, True):
        found = torch.load(tmp_path / "x", weights_only=True, mmap=mmap)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert bits(found).equal(bits(tensor))
        assert found.untyped_storage().nbytes() == tensor.nbytes
    with (tmp_path / "x").open("rb") as file:
        record = find_record(file, 0, len(raw), check=False)
    assert raw[record.offset : record.end] == bytes(_torch.host_bytes(tensor.contiguous()))
    assert record.offset % 64 == 0 or not tensor.numel()
