"""Small tokenizers and chat templates like those of known model families, for tests of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "What is the sum of three and four? Use the tool, then answer the user in one word.",
    "You are a helpful assistant. The answer is inside the tags. <answer>12</answer>",
    "<|im_end|> is the end of a turn; im_start and im_end frame the text of the user and the assistant.",
]

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA3 = """{{- bos_token }}
{%- set day = strftime_now("%Y") if false else "2024" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + day + "\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('Unknown role: ' + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Tools are written as Hermes and Qwen 2.5 do it.
QWEN25 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\nYou may call these functions:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nReply with <tool_call>\\n{\\"name\\": ..., \\"arguments\\": ...}" }}
    {{- "\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- set tool_call = tool_call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# The assistant's turn has no header: its message starts right after the user's.
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}"
    "{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)

TEMPLATES = {"smollm2": SMOLLM2, "llama3": LLAMA3, "qwen2.5": QWEN25, "mistral": MISTRAL}
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
SPECIAL += ["[INST]", "[/INST]"]
# Added tokens that are not "special", so that decoding keeps them.
MARKUP = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
# The token that ends a turn, by template.
END = {"smollm2": "<|im_end|>", "llama3": "<|eot_id|>", "qwen2.5": "<|im_end|>", "mistral": "<|endoftext|>"}


def write_tokenizer(folder: Path, template: str = "smollm2", in_vocab: bool = True, **settings: Any) -> Path:
    """Writes a byte-level BPE tokenizer to `folder`, which is returned.

    `template` is a name in TEMPLATES or the text of a template. Special tokens have the first ids if `in_vocab` is true
    (as in SmolLM2), else the last, and text is normalised to NFC (as in Qwen). `settings` are added to the file
    tokenizer_config.json.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if not in_vocab:
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    first = SPECIAL if in_vocab else []
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=first, show_progress=False),
    )
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    tokenizer.add_tokens([AddedToken(s, special=False, normalized=False) for s in MARKUP])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": END.get(template, "<|im_end|>"),
        "chat_template": TEMPLATES.get(template, template),
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | settings))
    return folder
