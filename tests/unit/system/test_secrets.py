"""Values of environment variables are removed from texts, in every form in which programs write them."""

from __future__ import annotations

import base64
import html
import json
import re
import traceback
from urllib.parse import quote, quote_plus, urlencode

import pytest

from cohort.scoring.wire import MAX_FAILURE, MAX_PRINTED, Reply
from cohort.scoring.worker import CapturedOutput, describe_error, shorten_reply
from cohort.system.secrets import (
    HEAD_LENGTH,
    MIN_LENGTH,
    Secrets,
    hide_named_variables,
    remove_hidden,
)
from cohort.tasks.base import MAX_REASON

VALUES = {
    "plain": "sk-proj-0123456789abcdefXYZ",
    "quotes": 'it\'s "both" quotes 42',
    "single": "o'clock-77-secret",
    "unicode": "schlüssel-Ω-密钥-77",
    "url": "a+b%20c&d=e/f?g#h",
    "lines": "-----BEGIN KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQEF\n-----END KEY-----\n",
    "slash": "back\\slash\\and\ttab",
}


@pytest.fixture(params=sorted(VALUES))
def value(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns a value that is set in the variable PLANTED."""
    monkeypatch.setenv("PLANTED", VALUES[request.param])
    return VALUES[request.param]


def write_forms(value: str) -> dict[str, str]:
    """Returns texts with the value in them, as libraries write them, by what wrote them."""
    data = value.encode()
    forms = {
        "as it is": f"key={value}!",
        "without blanks": f"[{value.strip()}]",
        "one line": " ".join(f"failed with {value} here".split()),
        "repr": repr(value),
        "repr in other quotes": repr(f'it\'s {value} "so"'),
        "ascii": ascii(value),
        "bytes": repr(f"Bearer {value}".encode()),
        "bytes in other quotes": repr(f'it\'s {value} "so"'.encode()),
        "json": json.dumps({"key": value}),
        "json of unicode": json.dumps({"key": value}, ensure_ascii=False),
        "quote": f"https://host/{quote(value)}",
        "quote all": quote(value, safe=""),
        "quote_plus": quote_plus(value),
        "form": urlencode({"key": value}),
        "hex": data.hex(),
        "large hex": data.hex().upper(),
        "quote in small letters": re.sub("%..", lambda found: found[0].lower(), quote(value, safe="")),
        "json with slashes": json.dumps({"key": value}).replace("/", "\\/"),
        "html": html.escape(f"<b>{value}</b>"),
        "html without quotes": html.escape(value, quote=False),
        "html in numbers": html.escape(value).replace("&#x27;", "&#39;"),
        "base32": base64.b32encode(data).decode(),
        "base64": base64.b64encode(data).decode(),
        "base64 of a URL": base64.urlsafe_b64encode(data).decode(),
    }
    for user in ("", "u", "us", "usr", "user"):
        forms[f"basic {user}"] = base64.b64encode(f"{user}:{value}".encode()).decode()
    return forms


def pieces(value: str) -> set[str]:
    """Returns what must not be left of a value: any eight neighbouring characters of a line of it."""
    return {line[i : i + 8] for line in value.splitlines() for i in range(max(1, len(line) - 7)) if len(line) >= 8}


def test_every_form_of_a_value_is_removed(value: str) -> None:
    secrets = Secrets(["PLANTED"])
    for how, text in write_forms(value).items():
        left = secrets.remove_from(text)
        assert "[PLANTED]" in left, how
        assert not any(piece in left for piece in pieces(value)), how
        # Nothing of base64 that is longer than what its borders share with other bytes.
        core = base64.b64encode(value.encode()).decode()[2:-6]
        assert core not in left, how


def test_a_beginning_of_a_value_is_removed(value: str) -> None:
    secrets = Secrets(["PLANTED"])
    first = value.splitlines()[0]
    for size in range(HEAD_LENGTH, len(first)):
        assert secrets.remove_from(f"gave {first[:size]!r} for it") == "gave '[PLANTED]' for it" or "'" in value
        assert first[:HEAD_LENGTH] not in secrets.remove_from(f"gave {first[:size]}")


def test_other_texts_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGION", "eu")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("KEY", "sk-0123456789")
    monkeypatch.delenv("ABSENT", raising=False)
    secrets = Secrets(["REGION", "EMPTY", "KEY", "ABSENT"])
    text = "a neutral text with europe, sk-, sk-0 and 0123456789"
    assert secrets.remove_from(text) == text and len("eu") < MIN_LENGTH
    assert Secrets().remove_from("sk-0123456789") == "sk-0123456789"


def test_of_two_values_the_longer_one_is_removed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORT", "abcdef")
    monkeypatch.setenv("LONG", "abcdefghij")
    assert Secrets(["SHORT", "LONG"]).remove_from("abcdefghij abcdef") == "[LONG] [SHORT]"


def test_values_in_lists_and_keys_are_removed(value: str) -> None:
    secrets = Secrets(["PLANTED"])
    tree = {"a": [value, {"b " + value: [1, None, 2.5, value]}], value: True}
    shown = json.dumps(secrets.remove_from_value(tree), ensure_ascii=False)
    assert not any(piece in shown for piece in pieces(value)) and shown.count("[PLANTED]") == 4


def test_no_field_of_a_reply_has_a_value_also_if_a_limit_cuts_it(value: str) -> None:
    secrets = Secrets(["PLANTED"])
    try:
        raise RuntimeError(f"the service said {value}")
    except RuntimeError as error:
        failure = describe_error(error, f"printed {value}", f"; columns {value}")
        trace = traceback.format_exc()
    for limit in (MAX_REASON, MAX_FAILURE, MAX_PRINTED):
        for before in range(limit - len(value), limit + 1, 3):
            cut = "." * before + value
            reply = Reply(
                number=0,
                reason=cut,
                printed=cut,
                broken=cut,
                failure=cut,
                memory=cut,
                contract=cut,
                replies=[{"role": "user", "content": trace}],
                group=[[{"correct": 1.0}, cut], [{"correct": 0.0}, failure]],
            )
            line = json.dumps(json.loads(shorten_reply(reply, secrets).encode()), ensure_ascii=False)
            assert not any(piece in line for piece in pieces(value))


def test_what_is_printed_in_pieces_or_across_the_limit_has_no_value(value: str) -> None:
    for before in range(30):
        printed = CapturedOutput(40, Secrets(["PLANTED"]))
        printed.write("." * before)
        for character in value:
            printed.write(character)
        assert not any(piece in printed.text for piece in pieces(value)) and len(printed.text) <= 40


def test_a_process_hides_what_its_command_line_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cohort.system.secrets._hidden", [])
    for name in ("ONE", "TWO", "THREE", "FOUR"):
        monkeypatch.setenv(name, f"value-of-{name.lower()}")
    text = "value-of-one value-of-two value-of-three value-of-four"
    assert remove_hidden(text) == text
    hide_named_variables(["--scoring.env", "ONE", "TWO", "--steps", "FOUR", "--scoring.env=THREE"])
    assert remove_hidden(text) == "[ONE] [TWO] [THREE] value-of-four"
