"""A system prompt and a template file of the user's own: how prompts are rendered with them, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cohort.config.load import dump_config, load_config, parse_config
from cohort.config.options import EvalOptions
from cohort.errors import ConfigError, ModelError
from cohort.models.catalog import resolve_model
from cohort.text import PromptRenderer, Tokenizer
from cohort.text.framing import describe_template, digest_template, read_template
from cohort.text.plain import add_system

ASK = [{"role": "user", "content": "1+1?"}]


def test_a_system_prompt_comes_before_the_messages_of_the_task() -> None:
    tokenizer = Tokenizer.load(resolve_model("tiny"))
    for template, rendered in (("chat", "<|im_start|>system\nBe brief.<|im_end|>"), ("text", "Be brief.\n\n1+1?")):
        prompt = tokenizer.spell(PromptRenderer(tokenizer, template, "Be brief.").render(ASK).tokens)
        assert prompt.startswith(rendered) and "1+1?" in prompt
        plain = tokenizer.spell(PromptRenderer(tokenizer, template, "").render(ASK).tokens)
        assert "Be brief." not in plain
    own = [{"role": "system", "content": "Add."}, *ASK]
    assert add_system(own, "Be brief.") == [{"role": "system", "content": "Be brief.\n\nAdd."}, *ASK]
    assert own[0]["content"] == "Add." and add_system(own, "") == own


def test_a_template_file_takes_the_place_of_the_models_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] ")
    tokenizer = Tokenizer.load(resolve_model("tiny"), "", read_template(str(file)))
    prompt = PromptRenderer(tokenizer, str(file), "Be brief.").render(ASK)
    assert tokenizer.spell(prompt.tokens) == "[system] Be brief.\n[user] 1+1?\n[assistant] "
    assert describe_template(str(file)) == f"mine.jinja {digest_template(str(file))}"
    before = digest_template(str(file))
    file.write_text(file.read_text() + " ")
    assert digest_template(str(file)) != before
    assert describe_template("chat") == "chat" and digest_template("text") == ""


def test_a_template_file_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jinja cannot be read \(No such file .*put the file there"):
        read_template(str(tmp_path / "none.jinja"))
    (tmp_path / "empty.jinja").write_text(" \n")
    with pytest.raises(ConfigError, match=r"is empty\. Write a chat template into it"):
        read_template(str(tmp_path / "empty.jinja"))
    with pytest.raises(
        ModelError, match=r"^the chat template in the file of --template is not valid Jinja.*; correct that"
    ):
        Tokenizer.load(resolve_model("tiny"), "", "{% for %}")
    wrong = r"template is htm; it must be chat, text, or a file that ends in .jinja. Correct or remove --template"
    with pytest.raises(ConfigError, match=wrong):
        load_config("quickstart", ["--template", "htm"])
    with pytest.raises(ConfigError, match=r"--template is htm; it must be chat, text, or a file"):
        EvalOptions(template="htm").check()
    with pytest.raises(ConfigError, match=r"--template x\.jinja has no effect with --engine server"):
        EvalOptions(template="x.jinja", engine="server", url="http://x").check()


def test_both_are_settings_of_a_run_and_sft_refuses_a_system_prompt() -> None:
    config = load_config("quickstart", ["--system", "Be brief.", "--template", "a b.jinja"])
    assert (config.system, config.template) == ("Be brief.", "a b.jinja")
    assert parse_config(dump_config(config)) == config
    old = dump_config(load_config("quickstart")).replace("system: ''\n", "")
    assert parse_config(old, warn=False).system == ""
    with pytest.raises(ConfigError, match=r"--system has no effect: --data traces are synthetic conversations"):
        load_config("tiny_sft", ["--system", "x"])
    assert load_config("tiny_sft", ["--template", "x.jinja"]).template == "x.jinja"


def test_a_template_must_be_a_regular_file_of_a_bounded_size(tmp_path: Path) -> None:
    """A pipe would be waited for without end, and a device read without end."""
    os.mkfifo(tmp_path / "pipe.jinja")
    (tmp_path / "zero.jinja").symlink_to("/dev/zero")
    (tmp_path / "folder.jinja").mkdir()
    for name in ("pipe.jinja", "zero.jinja", "folder.jinja"):
        with pytest.raises(ConfigError, match=rf"^the template file \S+{name} is no regular file\. Name a file "):
            read_template(str(tmp_path / name))
    with (tmp_path / "large.jinja").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(
        ConfigError, match=r"^the template file \S+ has 1099511627776 bytes, but a template has at most"
    ):
        read_template(str(tmp_path / "large.jinja"))


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('no') }}", "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"],
)
def test_a_template_file_that_fails_is_named_as_such(source: str) -> None:
    with pytest.raises(
        ModelError, match=r"^the chat template in the file of --template .* correct that file"
    ) as caught:
        Tokenizer.load(resolve_model("tiny"), "", source).render(ASK)
    assert "model" not in str(caught.value)


def test_a_system_prompt_that_cannot_be_used_is_named() -> None:
    with pytest.raises(ConfigError, match=r"system is .*; it must be text in UTF-8.* --system"):
        load_config("quickstart", ["--system", "a\udcff"])
    with pytest.raises(ConfigError, match=r"--system is .*; it must be text in UTF-8"):
        EvalOptions(system="a\udcff").check()
    renderer = PromptRenderer(Tokenizer.load(resolve_model("tiny")), "chat", "x " * 1000)
    with pytest.raises(ConfigError, match=r"--system has \d+ tokens, more than the 50 .* Shorten --system"):
        renderer.check_system(50)
    renderer.check_system(0)
    renderer.check_system(10_000)
