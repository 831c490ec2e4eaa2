"""Which language an answer is written in, by langdetect: the one place that imports it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from cohort.errors import TaskError

LANGUAGES = (
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro "
    "ru sk sl so sq sv sw ta te th tl tr uk ur vi zh-cn zh-tw"
)
SEED = 0
MAX_CHARS = 20_000  # langdetect itself looks at 10,000 after it took addresses out, slowly


def require() -> None:
    """Refuse now what would fail in the middle of a run."""
    _factory()


def response_language(text: str, *, language: str) -> bool:
    """The answer as a whole is in the language; one that has none (only digits, say) passes, as in the reference."""
    return detect(text) in (language, None)


def detect(text: str) -> str | None:
    """The most probable language, or None where nothing tells. The same for the same text: the draws are seeded."""
    from langdetect import LangDetectException

    detector = _factory().create()
    detector.append(text[:MAX_CHARS])
    try:
        return str(detector.detect())
    except LangDetectException:
        return None


@cache
def _factory() -> Any:
    try:
        from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
    except ImportError as error:
        raise TaskError("ifeval needs langdetect to tell languages: pip install 'cohort[ifeval]'") from error
    factory = DetectorFactory()
    # sorted, since the order in which a file system lists them would decide the last bits of the sums
    factory.load_json_profile([file.read_text(encoding="utf-8") for file in sorted(Path(PROFILES_DIRECTORY).iterdir())])
    factory.seed = SEED
    return factory
