"""The head of a GGUF file: what the gguf package reads, and what no file may make us do."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf as peer
import pytest

from cohort.errors import ModelError
from cohort.models.gguf import reader
from cohort.models.gguf.reader import read_head
from tests.helpers.gguf_file import write_gguf


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def head(*values: bytes, tensors: bytes = b"", num_tensors: int = 0, version: int = 3, num_values: int = -1) -> bytes:
    count = len(values) if num_values < 0 else num_values
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, count) + b"".join(values) + tensors


def tensor(name: str, *sides: int, form: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sides)}QIQ", len(sides), *sides, form, offset)


def written(tmp_path: Path, content: bytes) -> Path:
    (tmp_path / "m.gguf").write_bytes(content)
    return tmp_path / "m.gguf"


def test_the_same_as_the_gguf_package(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", packed="Q8_0")
    found, expected = read_head(tmp_path / "m.gguf"), peer.GGUFReader(tmp_path / "m.gguf")
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
    values = [text(f"n{kind}") + struct.pack("<I" + code, kind, value) for kind, code, value in numbers]
    values.append(text("text") + struct.pack("<I", 8) + text("é世"))
    values.append(text("texts") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text(""))
    values.append(text("floats") + struct.pack("<IIQ2f", 9, 6, 2, 0.25, -1.0))
    values.append(text("truths") + struct.pack("<IIQ3?", 9, 7, 3, True, False, True))
    found = read_head(written(tmp_path, head(*values))).metadata
    assert {f"n{kind}": value for kind, _, value in numbers} == {k: v for k, v in found.items() if k[1:].isdigit()}
    assert found["n7"] is True
    assert (found["text"], found["texts"], list(found["floats"])) == ("é世", ["a", ""], [0.25, -1.0])
    assert list(found["truths"]) == [1, 0, 1]


@pytest.mark.parametrize("alignment, start", [(None, 128), (8, 104), (64, 128), (256, 256)])
def test_weights_start_at_a_multiple_of_the_alignment(alignment: int | None, start: int, tmp_path: Path) -> None:
    key = text("general.alignment" if alignment else "general.nonsenses") + struct.pack("<II", 4, alignment or 7)
    content = head(key, tensors=tensor("t", 3, 2, offset=32), num_tensors=1)
    assert len(content) == 98
    (found,) = read_head(written(tmp_path, content)).tensors
    assert (found.shape, found.num_weights, found.offset) == ((2, 3), 6, start + 32)


HUGE = 2**62


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is not a GGUF file"),
        (b"GGUF", "is not a GGUF file"),
        (head(version=1), "version 1: only 2 and 3"),
        (head(version=3 << 24), "of a big-endian machine"),
        (head(num_values=HUGE), "more bytes should follow, 0 do"),
        (head(num_tensors=HUGE), "more bytes should follow, 0 do"),
        (head(text("a") + struct.pack("<I", 8) + struct.pack("<Q", HUGE)), "more bytes should follow"),
        (head(text("a") + struct.pack("<IIQ", 9, 8, HUGE)), "more bytes should follow"),
        (head(text("a") + struct.pack("<IIQ", 9, 0, HUGE)), "more bytes should follow"),
        (head(text("a") + struct.pack("<IIQ", 9, 9, 1) + b"\0" * 99), "a value of unknown type 9"),  # arrays of arrays
        (head(text("a") + struct.pack("<I", 77) + b"\0" * 9), "a value of unknown type 77"),
        (head(*[text("a") + struct.pack("<IB", 0, 1)] * 2), '"a" is there twice'),
        (head(struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", 0, 1)), "not UTF-8"),
        (head(tensors=tensor("t", 4) * 2, num_tensors=2), "two tensors have the same name"),
        (head(tensors=tensor("t", 4, 0), num_tensors=1), 'tensor "t" is empty'),
        (head(tensors=tensor("t", 1, 1, 1, 1, 1), num_tensors=1), 'tensor "t" has 5 dimensions'),
        (head(tensors=text("t") + struct.pack("<I", 2**32 - 1) + b"\0" * 99, num_tensors=1), "dimensions"),
        (head(text("general.alignment") + struct.pack("<II", 4, 0)), "general.alignment is 0"),
        (head(text("general.alignment") + struct.pack("<II", 4, 48)), "general.alignment is 48"),
        (head(text("general.alignment") + struct.pack("<If", 6, 32.0)), "general.alignment is 32.0"),
    ],
)
def test_what_is_wrong_is_said_at_little_cost(content: bytes, message: str, tmp_path: Path) -> None:
    file = written(tmp_path, content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=message) as e:
            read_head(file)
        assert tracemalloc.get_traced_memory()[1] < 300_000
    finally:
        tracemalloc.stop()
    assert str(file) in str(e.value)


def test_a_head_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of nothing but a vocabulary would take several times its size in memory."""
    monkeypatch.setattr(reader, "MAX_HEAD", 1000)
    words = text("a") + struct.pack("<IIQ", 9, 8, 200) + text("ab") * 200
    with pytest.raises(ModelError, match="more than 1000 bytes lie before the weights"):
        read_head(written(tmp_path, head(words)))


def test_no_file_and_no_right_to_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.gguf does not exist"):
        read_head(tmp_path / "nothing.gguf")
    with pytest.raises(ModelError, match="Is a directory"):
        read_head(tmp_path)
