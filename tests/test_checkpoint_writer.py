"""What is written of a tensor is what torch.save writes of it, byte for byte, and every reader of torch has it back."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from funshard.checkpoint._files.untrusted import read_record
from funshard.checkpoint._files.writer import PIECE_BYTES, make_record_layout, write_record

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


def written(tensor: Tensor) -> bytes:
    file = io.BytesIO()
    assert write_record(file, tensor, {})[0] == len(file.getvalue())
    return file.getvalue()


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("name", TENSORS)
def test_torch_reads_it(tmp_path: Path, name: str) -> None:
    """Into memory, or mapped; every checksum is that of what is there."""
    tensor = TENSORS[name]
    (tmp_path / "x").write_bytes(raw := written(tensor))
    for mmap in (False, True):
        found = torch.load(tmp_path / "x", weights_only=True, mmap=mmap)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert bits(found).equal(bits(tensor))
        assert found.untyped_storage().nbytes() == tensor.nbytes
    assert zipfile.ZipFile(tmp_path / "x").testzip() is None
    assert read_record(lambda at, n: raw[at : at + n], len(raw), check_other_members=True).nbytes == tensor.nbytes


@pytest.mark.parametrize("name", TENSORS)
def test_it_is_what_torch_saves(name: str) -> None:
    """But for the last member, a digest of the others' checksums by which torch counts files, and no reader needs."""
    tensor = TENSORS[name].clone()
    file = io.BytesIO()
    torch.save(tensor, file)
    found, expected = (zipfile.ZipFile(x) for x in (io.BytesIO(written(tensor)), file))
    for a, b in zip(found.infolist(), expected.infolist(), strict=True):
        assert (a.filename, a.header_offset, a.file_size) == (b.filename, b.header_offset, b.file_size)
        if not a.filename.endswith("serialization_id"):
            assert a.CRC == b.CRC
            assert found.read(a) == expected.read(b)
    digest = found.infolist()[-1].header_offset
    assert written(tensor)[:digest] == file.getvalue()[:digest]


def test_elements_are_at_a_multiple_of_64_bytes() -> None:
    """As torch has them, so that they can be used where they are mapped."""
    for tensor in map(torch.clone, TENSORS.values()):
        assert len(make_record_layout(tensor.dtype, tensor.shape, tensor.stride()).before) % 64 == 0 or not tensor.numel()


def test_one_who_skips_writing_elsewhere() -> None:
    """torch's own switch is set within, and as it was before after it."""
    with torch.serialization.skip_data():
        raw = written(torch.ones(3))
        torch.save(torch.ones(3), file := io.BytesIO())
    assert torch.load(io.BytesIO(raw), weights_only=True).equal(torch.ones(3))
    assert torch.load(io.BytesIO(file.getvalue()), weights_only=True).equal(torch.zeros(3))
