"""Checks of the language of an answer with langdetect; the only module that imports it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from cohort.errors import TaskError

PACKAGE, EXTRA = "langdetect", "cohort[ifeval]"

LANGUAGES = (
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro "
    "ru sk sl so sq sv sw ta te th tl tr uk ur vi zh-cn zh-tw"
)
# langdetect draws at random; with a fixed seed, the same text always gets the same language.
SEED = 0
# langdetect uses 10,000 characters, but first it removes addresses from the whole text, which is slow.
MAX_CHARS = 20_000


def is_in_language(text: str, *, language: str) -> bool:
    """Returns whether langdetect takes the text for the language, given as a code such as "de".

    Only the most probable language of the first MAX_CHARS characters counts. The result is also True for a text that
    has no language, for example only digits, as in the reference checker.
    """
    return detect_language(text) in (language, None)


def detect_language(text: str) -> str | None:
    """Returns the code of the text's most probable language, such as "en"; None if none can be detected.

    Only the first MAX_CHARS characters are read. Equal texts get equal results. Raises TaskError if langdetect is not
    installed.
    """
    # Before the import below, because it says in plain words what is missing.
    detector = _load_detector_factory().create()
    from langdetect import LangDetectException

    detector.append(text[:MAX_CHARS])
    try:
        return str(detector.detect())
    except LangDetectException:
        return None


@cache
def _load_detector_factory() -> Any:
    """Returns langdetect's factory of detectors with all language profiles loaded and a fixed seed.

    It is made once per process. Raises TaskError if langdetect is not installed.
    """
    try:
        from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
    except ImportError as error:
        raise TaskError(
            f"checking the language of an answer needs langdetect, which is not installed; run pip install '{EXTRA}'"
        ) from error
    factory = DetectorFactory()
    # The files are sorted, because the order in which a file system lists them would change the last bits of sums.
    factory.load_json_profile([file.read_text(encoding="utf-8") for file in sorted(Path(PROFILES_DIRECTORY).iterdir())])
    factory.seed = SEED
    return factory
