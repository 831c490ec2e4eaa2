"""Chat templates with marks around the assistant's answers, and a tiny Llama, for whole trainings by TRL and by us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# ChatML with tools. What is between the marks is the answer with its stop token; a line break follows.
MARKED = """{%- if tools %}
    {{- '<|im_start|>system\\nTools: ' + tools | tojson + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content }}
            {%- if message.tool_calls %}
                {{- '<tool_call>' + message.tool_calls[0].function.name }}
                {{- message.tool_calls[0].function.arguments | tojson + '</tool_call>' }}
            {%- endif %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# The stop token is outside of the marks.
MARKED_WITHOUT_STOP = MARKED.replace(
    "            {{- '<|im_end|>' }}\n        {%- endgeneration %}",
    "        {%- endgeneration %}\n        {{- '<|im_end|>' }}",
)
# Nothing follows the last turn: the line break comes before the others.
NOTHING_AFTER = MARKED.replace("    {{- '\\n' }}\n{%- endfor %}", "{%- endfor %}").replace(
    "{{- '<|im_start|>' + message.role", "{{- ('' if loop.first else '\\n') + '<|im_start|>' + message.role"
)
NOTHING_AFTER = NOTHING_AFTER.replace("{{- '<|im_start|>assistant", "{{- '\\n<|im_start|>assistant")


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def save_llama(folder: Path) -> Path:
    """Saves a tiny random Llama with room for the vocabulary of `write_tokenizer`. Returns the folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        # Weights are large enough that log-probabilities differ visibly.
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
