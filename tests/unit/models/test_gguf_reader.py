"""Tests of the GGUF header reader: it reads what the gguf package reads, and resists damaged and malicious files."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf as peer
import pytest

from cohort.errors import ModelError
from cohort.models.gguf import reader
from cohort.models.gguf.reader import read_header
from tests.helpers.gguf_file import write_gguf


def pack_text(value: str) -> bytes:
    """Returns a GGUF string."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pack_header(
    *values: bytes, tensors: bytes = b"", num_tensors: int = 0, version: int = 3, num_values: int = -1
) -> bytes:
    """Returns the bytes of a header with packed metadata values and packed tensor entries; counts may be wrong."""
    count = len(values) if num_values < 0 else num_values
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, count) + b"".join(values) + tensors


def pack_tensor(name: str, *sides: int, form: int = 0, offset: int = 0) -> bytes:
    """Returns the header entry of a tensor."""
    return pack_text(name) + struct.pack(f"<I{len(sides)}QIQ", len(sides), *sides, form, offset)


def write_file(tmp_path: Path, content: bytes) -> Path:
    """Writes a file with these bytes and returns its path."""
    (tmp_path / "m.gguf").write_bytes(content)
    return tmp_path / "m.gguf"


def test_the_same_as_the_gguf_package(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", packed="Q8_0")
    found, expected = read_header(tmp_path / "m.gguf"), peer.GGUFReader(tmp_path / "m.gguf")
    fields = {name: field.contents() for name, field in expected.fields.items() if not name.startswith("GGUF.")}
    assert found.metadata.keys() == fields.keys()
    for name, value in fields.items():
        mine = found.metadata[name]
        assert (mine if isinstance(mine, str) or not hasattr(mine, "__len__") else list(mine)) == value, name
    assert [(t.name, t.shape, t.format, t.offset) for t in found.tensors] == [
        (t.name, tuple(reversed(t.shape.tolist())), t.tensor_type.value, t.data_offset) for t in expected.tensors
    ]


def test_every_type_of_value_by_hand(tmp_path: Path) -> None:
    numbers = [(0, "B", 255), (1, "b", -1), (2, "H", 65535), (3, "h", -2), (4, "I", 2**32 - 1), (5, "i", -3)]
    numbers += [(6, "f", 0.5), (7, "?", True), (10, "Q", 2**64 - 1), (11, "q", -4), (12, "d", 1e300)]
    values = [pack_text(f"n{kind}") + struct.pack("<I" + code, kind, value) for kind, code, value in numbers]
    values.append(pack_text("text") + struct.pack("<I", 8) + pack_text("é世"))
    values.append(pack_text("texts") + struct.pack("<IIQ", 9, 8, 2) + pack_text("a") + pack_text(""))
    values.append(pack_text("floats") + struct.pack("<IIQ2f", 9, 6, 2, 0.25, -1.0))
    values.append(pack_text("truths") + struct.pack("<IIQ3?", 9, 7, 3, True, False, True))
    found = read_header(write_file(tmp_path, pack_header(*values))).metadata
    assert {f"n{kind}": value for kind, _, value in numbers} == {k: v for k, v in found.items() if k[1:].isdigit()}
    assert found["n7"] is True
    assert (found["text"], found["texts"], list(found["floats"])) == ("é世", ["a", ""], [0.25, -1.0])
    assert list(found["truths"]) == [1, 0, 1]


@pytest.mark.parametrize("alignment, start", [(None, 128), (8, 104), (64, 128), (256, 256)])
def test_weights_start_at_a_multiple_of_the_alignment(alignment: int | None, start: int, tmp_path: Path) -> None:
    key = pack_text("general.alignment" if alignment else "general.nonsenses") + struct.pack("<II", 4, alignment or 7)
    content = pack_header(key, tensors=pack_tensor("t", 3, 2, offset=32), num_tensors=1)
    assert len(content) == 98
    (found,) = read_header(write_file(tmp_path, content)).tensors
    assert (found.shape, found.num_weights, found.offset) == ((2, 3), 6, start + 32)


HUGE = 2**62


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is not a GGUF file"),
        (b"GGUF", "is not a GGUF file"),
        (pack_header(version=1), "version 1: only 2 and 3"),
        (pack_header(version=3 << 24), "of a big-endian machine"),
        (pack_header(num_values=HUGE), "more bytes should follow, but only 0 do"),
        (pack_header(num_tensors=HUGE), "more bytes should follow, but only 0 do"),
        (pack_header(pack_text("a") + struct.pack("<I", 8) + struct.pack("<Q", HUGE)), "more bytes should follow"),
        (pack_header(pack_text("a") + struct.pack("<IIQ", 9, 8, HUGE)), "more bytes should follow"),
        (pack_header(pack_text("a") + struct.pack("<IIQ", 9, 0, HUGE)), "more bytes should follow"),
        (
            pack_header(pack_text("a") + struct.pack("<IIQ", 9, 9, 1) + b"\0" * 99),
            "a value of unknown type 9",
        ),  # arrays of arrays
        (pack_header(pack_text("a") + struct.pack("<I", 77) + b"\0" * 9), "a value of unknown type 77"),
        (pack_header(*[pack_text("a") + struct.pack("<IB", 0, 1)] * 2), '"a" is there twice'),
        (pack_header(struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", 0, 1)), "not UTF-8"),
        (pack_header(tensors=pack_tensor("t", 4) * 2, num_tensors=2), "two tensors have the same name"),
        (pack_header(tensors=pack_tensor("t", 4, 0), num_tensors=1), 'tensor "t" is empty'),
        (pack_header(tensors=pack_tensor("t", 1, 1, 1, 1, 1), num_tensors=1), 'tensor "t" has 5 dimensions'),
        (pack_header(tensors=pack_text("t") + struct.pack("<I", 2**32 - 1) + b"\0" * 99, num_tensors=1), "dimensions"),
        (pack_header(pack_text("general.alignment") + struct.pack("<II", 4, 0)), "general.alignment is 0"),
        (pack_header(pack_text("general.alignment") + struct.pack("<II", 4, 48)), "general.alignment is 48"),
        (pack_header(pack_text("general.alignment") + struct.pack("<If", 6, 32.0)), "general.alignment is 32.0"),
    ],
)
def test_damaged_headers_raise_clear_errors_without_large_allocations(
    content: bytes, message: str, tmp_path: Path
) -> None:
    file = write_file(tmp_path, content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=message) as e:
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < 300_000
    finally:
        tracemalloc.stop()
    assert str(file) in str(e.value)


def test_a_head_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of nothing but a vocabulary would take several times its size in memory."""
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", 1000)
    words = pack_text("a") + struct.pack("<IIQ", 9, 8, 200) + pack_text("ab") * 200
    with pytest.raises(ModelError, match="more than 1000 bytes lie before the weights"):
        read_header(write_file(tmp_path, pack_header(words)))


def test_no_file_and_no_right_to_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.gguf does not exist"):
        read_header(tmp_path / "nothing.gguf")
    with pytest.raises(ModelError, match="Is a directory"):
        read_header(tmp_path)
