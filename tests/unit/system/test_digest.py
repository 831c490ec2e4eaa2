"""Digests of files: every byte counts, and the cache never gives the digest of another content."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from cohort.system import digest
from cohort.system.digest import digest_file, digest_files


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of the cache, which is empty. Files are old enough for it as soon as they are written."""
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digest, "MIN_AGE_SECONDS", -1.0)
    return tmp_path / "cache" / "digests"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that gets the name of every file that is read to be hashed."""
    names: list[str] = []
    hash_file = hashlib.file_digest

    def note(file, kind):
        names.append(Path(file.name).name)
        return hash_file(file, kind)

    monkeypatch.setattr(digest.hashlib, "file_digest", note)
    return names


def test_a_digest_is_the_sha256_of_the_whole_content(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"x" * 5_000_000)
    assert digest_file(tmp_path / "a") == hashlib.sha256(b"x" * 5_000_000).hexdigest()


def test_an_untouched_file_is_read_once(tmp_path: Path, reads: list[str]):
    file = tmp_path / "a"
    file.write_bytes(b"one")
    (tmp_path / "link").symlink_to(file)
    first = digest_file(file)
    assert digest_file(file) == digest_file(tmp_path / "link") == first and reads == ["a"]


@pytest.mark.parametrize("how", ["in place, with the old times", "by a rename", "longer"])
def test_a_changed_file_is_read_again(how: str, tmp_path: Path, reads: list[str]):
    file = tmp_path / "a"
    file.write_bytes(b"one")
    facts = file.stat()
    digest_file(file)
    if how == "by a rename":
        (tmp_path / "b").write_bytes(b"two")
        (tmp_path / "b").replace(file)
    else:
        file.write_bytes(b"two" if how != "longer" else b"twofold")
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert digest_file(file) == hashlib.sha256(file.read_bytes()).hexdigest() and reads == ["a", "a"]


def test_a_file_that_has_just_been_written_is_not_remembered(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(digest, "MIN_AGE_SECONDS", 2.0)
    (tmp_path / "a").write_bytes(b"one")
    digest_file(tmp_path / "a")
    # Times in the future, as a file from a machine with another clock has them.
    os.utime(tmp_path / "a", (4e9, 4e9))
    digest_file(tmp_path / "a")
    assert not cache.exists()


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "a"
    file.write_bytes(b"one")
    hash_file = hashlib.file_digest

    def change(opened, kind):
        found = hash_file(opened, kind)
        file.write_bytes(b"other")
        return found

    monkeypatch.setattr(digest.hashlib, "file_digest", change)
    digest_file(file)
    assert not cache.exists()


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]\n", b'{"file": 3}\n', b"\xff\xfe", "another digest", "a folder"])
def test_a_damaged_cache_is_ignored_and_mended(damage: bytes | str, tmp_path: Path, cache: Path, reads: list[str]):
    file = tmp_path / "a"
    file.write_bytes(b"one")
    right = digest_file(file)
    (entry,) = cache.iterdir()
    if damage == "a folder":
        entry.unlink()
        entry.mkdir()
    else:
        entry.write_bytes(entry.read_bytes().replace(right.encode(), b"0" * 64) if isinstance(damage, str) else damage)
    assert digest_file(file) == right and reads == ["a", "a"]
    if damage != "a folder":
        assert digest_file(file) == right and len(reads) == 2


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "no-folder").write_text("")
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "no-folder"))
    (tmp_path / "a").write_bytes(b"one")
    assert digest_file(tmp_path / "a") == hashlib.sha256(b"one").hexdigest()


def test_an_entry_says_what_it_is_about(tmp_path: Path, cache: Path):
    (tmp_path / "a").write_bytes(b"one")
    digest_file(tmp_path / "a")
    (entry,) = cache.iterdir()
    known = json.loads(entry.read_text().splitlines()[0])
    assert known["file"]["path"] == str((tmp_path / "a").resolve()) and known["file"]["size"] == 3


def test_files_together_have_a_digest_of_names_and_contents(tmp_path: Path):
    for name, content in {"a": b"1", "b": b"2", "c": b"2"}.items():
        (tmp_path / name).write_bytes(content)

    def whole(**files: str) -> str:
        return digest_files({name: tmp_path / file for name, file in files.items()})

    assert whole(x="a", y="b") == whole(y="c", x="a")
    assert len({whole(x="a", y="b"), whole(x="b", y="a"), whole(x="a"), whole(x="a", z="b"), whole()}) == 5
