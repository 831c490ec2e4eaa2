"""A chat template is a program of unknown origin: it ends soon, takes little memory, and fails in plain words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest

from cohort.errors import ModelError
from cohort.text import Tokenizer, bounded
from cohort.text.template import ChatTemplate, _GenerationBlock
from tests.helpers.chat_templates import TEMPLATES, write_tokenizer
from tests.helpers.command_line import ENV

USER = {"role": "user", "content": "What is 1+1?  "}
ROLES = {"bos_token": "<s>", "eos_token": "</s>"}
# `BIG` is a text of two million characters, `DEEP` a list that is short to write and endless to show.
BIG = "{% set ns = namespace(x='ab') %}{% for i in range(20) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
DEEP = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"


def doubling(expression: str, before: str = "") -> str:
    """Returns a template in which `ns.x` becomes the expression sixty times."""
    loop = "{% for i in range(60) %}" + before + "{% set ns.x = " + expression + " %}{% endfor %}"
    return "{% set ns = namespace(x='ab') %}" + loop


HOSTILE = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loop with a filter": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "loops that write": "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages }}{% endfor %}{% endfor %}",
    "power": "{{ 10**100000000 }}",
    "power of a variable": "{% set x = messages|length + 9 %}{{ x**100000000 }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "round": "{{ 5|round(1000000000, 'ceil') }}",
    "center": "{{ 'a'|center(1000000000) }}",
    "method center": "{{ 'a'.center(10000000000) }}",
    "method ljust": "{{ 'a'.ljust(10000000000) }}",
    "method rjust": "{{ 'a'.rjust(10000000000) }}",
    "method zfill": "{{ 'a'.zfill(10000000000) }}",
    "method expandtabs": "{{ '\t\t\t'.expandtabs(1000000000) }}",
    "method of bytes": "{{ 'a'.encode().ljust(10000000000) }}",
    "method by attr": "{{ ('a'|attr('ljust'))(10000000000) }}",
    "method by map": "{{ ['a']|map('center', 10000000000)|list }}",
    "to_bytes": "{{ (1).to_bytes(10000000000, 'big') }}",
    "times": "{{ 'a' * 10**10 }}",
    "times a list": "{{ [0] * 10**10 }}",
    "times of times": "{{ ([0] * 10**4) * 10**4 * 10**4 }}",
    "doubling by plus": doubling("ns.x + ns.x"),
    "doubling by tilde": doubling("ns.x ~ ns.x"),
    "doubling by join": doubling("[ns.x, ns.x]|join"),
    "doubling by replace": doubling("ns.x|replace('a', 'aa')"),
    "doubling by format": doubling("'%s%s'|format(ns.x, ns.x)"),
    "doubling by percent": doubling("'%s%s' % (ns.x, ns.x)"),
    "doubling by method": doubling("'{0}{0}'.format(ns.x)"),
    "doubling by a block": doubling("y", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "doubling by a macro": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + doubling("f(ns.x)"),
    "replace": BIG + "{{ ns.x|replace('a', ns.x) }}",
    "method replace": BIG + "{{ ns.x.replace('a', ns.x) }}",
    "method join": BIG + "{{ ns.x.join(ns.x) }}",
    "join": BIG + "{{ ns.x|join(ns.x) }}",
    "join of a generator": BIG + "{{ ns.x|map('upper')|join(ns.x) }}",
    "translate": BIG + "{{ ns.x.translate({97: ns.x}) }}",
    "slices": BIG
    + "{% set l = namespace(x=[]) %}{% for i in range(999) %}{% set l.x = l.x + [ns.x[i:]] %}{% endfor %}",
    "slices alone": BIG + "".join("{% set x" + str(i) + " = ns.x[" + str(i) + ":] %}" for i in range(999)),
    "punycode": BIG + "{{ (ns.x|replace('a', 'é')).encode('punycode') }}",
    "indent": BIG + "{{ ns.x|replace('a', '\n')|indent(1000) }}",
    "batch": "{{ [1]|batch(1000000000, 0)|list }}",
    "slice": "{{ [1]|slice(1000000000)|list }}",
    "sum of lists": "{{ ([[1] * 100] * 9999)|sum(start=[]) }}",
    "wide percent": "{{ '%1000000000d' % 1 }}",
    "wide precision": "{{ '%.1000000000f' % 1 }}",
    "wide star": "{{ '%*d' % (1000000000, 1) }}",
    "wide filter": "{{ '%1000000000d'|format(1) }}",
    "wide method": "{{ '{:1000000000}'.format(1) }}",
    "wide nested method": "{{ '{:{}}'.format(1, 1000000000) }}",
    "wide format_map": "{{ '{a:{b}}'.format_map({'a': 1, 'b': 1000000000}) }}",
    "json": "{{ [[[1]]]|tojson(indent=1000000000) }}",
    "shared lists": DEEP + "{{ ns.x }}",
    "shared lists compared": DEEP + DEEP.replace("ns", "other") + "{{ ns.x == other.x }}",
    "shared lists as JSON": DEEP + "{{ ns.x|tojson }}",
    "shared dicts": DEEP.replace("[ns.x, ns.x]", "dict(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "shared tuples": DEEP.replace("[ns.x, ns.x]", "(ns.x, ns.x)") + "{{ ns.x }}",
    "shared by plus": DEEP.replace("[ns.x, ns.x]", "[ns.x] + [ns.x]") + "{{ ns.x }}",
    "shared by times": DEEP.replace("[ns.x, ns.x]", "[ns.x] * 2") + "{{ ns.x }}",
    "lists of texts": BIG + "{% for i in range(999) %}{% set ns.y = [ns.x, i] ~ '' %}{% endfor %}",
    "output": BIG + "{% for i in range(99999) %}{{ ns.x }}{% endfor %}",
    "output of a list": BIG + "{% set y %}{% for i in range(99999) %}{{ [ns.x] }}{% endfor %}{% endset %}",
    "recursive macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for i in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "deep namespaces": "{% set a = namespace() %}{% set a.x = a %}{{ a }}{{ [a] }}{{ 1 / 0 }}",
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep lists": "{{ " + "[" * 500 + "]" * 500 + " }}",
    "deep loops": "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
    "deep conditions": "{% if x %}" * 300 + "{% endif %}" * 300,
    "comparisons": BIG + "{% set y = ns.x[:-1] ~ 'b' %}{% for i in range(99999) %}{{ ns.x == y }}{% endfor %}",
    "ten million characters": "x" * 10**7,
    "no such filter": "{{ 'a'|wordwrap(1) }}",
    "no such function": "{{ lipsum(1000000000) }}",
}


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowers the limits, so that they are reached soon."""
    monkeypatch.setattr(bounded, "MAX_STEPS", 10**5)
    monkeypatch.setattr(bounded, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(bounded, "MAX_SIZE", 2**23)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_plain_words(name: str) -> None:
    with pytest.raises(ModelError, match=r"^the model's chat template ") as caught:
        ChatTemplate(HOSTILE[name], ROLES).render([USER], None, generation_prompt=True)
    assert "model" in str(caught.value) and len(str(caught.value)) < 800


@pytest.mark.slow
def test_hostile_templates_take_little_memory() -> None:
    program = (
        "import re\n"
        "from cohort.errors import ModelError\n"
        "from cohort.text import bounded\n"
        "from cohort.text.template import ChatTemplate\n"
        "from tests.unit.text.test_template import HOSTILE, ROLES, USER\n"
        "bounded.MAX_STEPS, bounded.MAX_SECONDS = 10**5, 0.5\n"
        "for name, source in HOSTILE.items():\n"
        "    try:\n"
        "        ChatTemplate(source, ROLES).render([USER], None, generation_prompt=True)\n"
        "    except ModelError:\n"
        "        pass\n"
        # ru_maxrss would be that of the parent, if that is larger.
        "print(re.search('VmHWM:\\\\s*([0-9]+) kB', open('/proc/self/status').read())[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=ENV)
    assert int(done.stdout) < 600_000, "kilobytes"


@pytest.mark.usefixtures("hurried")
def test_a_rendering_after_a_hostile_one_has_all_of_its_limits() -> None:
    template = ChatTemplate("{% for i in range(messages[0].content|int) %}{% endfor %}done", ROLES)
    for _ in range(3):
        assert template.render([{"role": "user", "content": "30000"}], None, generation_prompt=True) == "done"
    with pytest.raises(ModelError, match="more than 100000 steps"):
        template.render([{"role": "user", "content": "99999"}], None, generation_prompt=True)


def test_a_long_conversation_may_be_copied_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MAX_SIZE", 1000)
    source = (
        "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x + m.content %}{% endfor %}{{ ns.x }}"
    )
    messages = [{"role": "user", "content": "x" * 1000}] * 50
    assert ChatTemplate(source, ROLES).render(messages, None, generation_prompt=True) == "x" * 50_000


def transformers_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Returns the sandbox without bounds."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    return env


# What templates of known models do: namespaces, loops in loops, macros, slices, formats, JSON, tests and filters.
EVERYTHING = """{%- macro show(name, fields, depth=0) -%}
{{ '  ' * depth }}{{ name }}:{% for key, value in fields|dictsort %}
{%- if value is mapping %}{{ show(key, value, depth + 1) }}{% else %}{{ key ~ '=' ~ value|tojson }}{% endif %};
{%- endfor %}{% endmacro -%}
{%- set ns = namespace(last=-1, system='', seen=[]) -%}
{%- for message in messages[::-1] %}{% if message.role == 'user' and ns.last < 0 %}
{%- set ns.last = messages|length - 1 - loop.index0 %}{% endif %}{% endfor -%}
{%- for message in messages if message.role in ['user', 'assistant', 'tool'] -%}
{%- if message.content is string %}{% set content = message.content.split('</think>')[-1].lstrip('\\n')|trim %}
{%- else %}{% set content %}{% for part in message.content %}{{ part.text|default('?', true) }}{% endfor %}{% endset %}
{%- endif -%}
{%- set ns.seen = ns.seen + [message.role] -%}
<{{ message.role|upper }} {{ loop.index }}/{{ loop.length }} {{ "%03d|%5.2f" % (loop.index, 1 / loop.index) }}>
{{- content.replace('1', 'one') }}{{ '{:>4}{a!r}'.format(loop.index, a=message.role) }}
{%- for call in message.tool_calls or [] %}{{ show(call.function.name, call.function.arguments) }}{% endfor -%}
{%- endfor -%}
{{ ns.seen|unique|map('title')|join(', ') }} {{ ns.seen|select('equalto', 'user')|list|length }} {{ ns.last }}
{{- tools|tojson(indent=2) if tools }}{{ (2 ** 10) // 3 % 7 }} {{ {'a': [1, 2.5, none, true]} }}
{{- messages|map(attribute='role')|batch(2, '-')|list }} {{ 'a\nb'|indent(3) }} {{ bos_token|center(9) }}
{{- (messages|selectattr('role', 'equalto', 'nobody')|first) is undefined }}
{%- filter upper %}done {{ eos_token }}{% endfilter %}{% generation %}x{% endgeneration %}
"""
CALL = {"function": {"name": "add", "arguments": {"b": {"c": "é"}, "a": [1]}}}
CONVERSATIONS: list[Any] = [
    [USER],
    [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n2"},
        USER,
    ],
    [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}, USER],
    [USER, {"role": "assistant", "content": "2"}] * 50,
    [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image"}]}],
]


@pytest.mark.parametrize("name", [*TEMPLATES, "everything"])
def test_honest_templates_write_what_they_write_without_bounds(name: str) -> None:
    source = {**TEMPLATES, "everything": EVERYTHING}[name]
    unbounded = transformers_environment().from_string(source)
    ours = ChatTemplate(source, ROLES)
    num_rendered = 0
    for messages in CONVERSATIONS:
        for tools in (None, [{"name": "add", "parameters": {"a": "é"}}]):
            values = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
            try:
                expected = unbounded.render(**values, **ROLES)
            except (jinja2.TemplateError, TypeError):  # some refuse contents that are not text
                with pytest.raises(ModelError, match="cannot render"):
                    ours.render(messages, tools, generation_prompt=True)
            else:
                assert ours.render(messages, tools, generation_prompt=True) == expected
                num_rendered += 1
    assert num_rendered >= 6


@pytest.mark.parametrize(
    "value",
    [
        7,
        True,
        {"default": "x"},
        [7],
        [{"name": "default"}],
        [{"name": [], "template": "x"}],
        [{"name": 7, "template": "x"}],
        [{"name": "x", "template": 7}],
    ],
)
def test_odd_chat_templates_are_named(tmp_path: Path, value: Any) -> None:
    folder = write_tokenizer(tmp_path, "", chat_template=value)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json .*chat_template"):
        Tokenizer.load(folder)


def test_a_template_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, "")
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template\.jinja cannot be read"):
        Tokenizer.load(folder)
