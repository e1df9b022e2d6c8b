"""Templates for models whose default one has no exact loss masks, and the special tokens of templates.

A template may rewrite earlier turns (for example, drop their reasoning): each answer is then a separate example. Two
kinds of templates cannot be trained on. In the first, the generation prompt differs from the text before a rendered
answer, so the policy would be trained on another prompt than the sampler's. The second writes no token at the end of an
answer. For models with such templates, this module has replacements that are selected by name:
`prepare_data.chat_template = "deepseek_r1"`. Reasoning stays in the answers, where `<think>` is the policy's own token.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DEEPSEEK_R1 = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '<｜Assistant｜>' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('no turns of the role ' + message['role']) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
"""DeepSeek-V3, DeepSeek-R1 and their distills. Their default template opens a reasoning that it leaves out of every
answer."""

NEMOTRON_3 = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\n<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no turns of the role ' + message['role']) }}{% endif %}"
    "{% set content = message['content'] or '' %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' and '</think>' not in content %}{{ '<think></think>' }}{% endif %}"
    "{{ content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Nemotron 3. Its default template opens reasoning on a new line, and renders an answer without any as
`<think></think>`."""

GLM_4_5 = (
    "[gMASK]<sop>{% if tools %}{{ '<|system|>\\n# Tools\\n\\n"
    "You may call one or more functions to assist with the user query.\\n\\n"
    "You are provided with function signatures within <tools></tools> XML tags:\\n<tools>\\n' }}"
    "{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) + '\\n' }}{% endfor %}{{ '</tools>\\n\\n"
    "For each function call, output the function name and arguments within the following XML format:\\n"
    "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value>{arg-value-1}</arg_value>\\n"
    "<arg_key>{arg-key-2}</arg_key>\\n<arg_value>{arg-value-2}</arg_value>\\n...\\n</tool_call>' }}{% endif %}"
    "{% set quiet = enable_thinking is defined and not enable_thinking %}"
    "{% for message in messages %}{% set content = message['content'] or '' %}"
    "{% set before = messages[loop.index0 - 1]['role'] if loop.index0 else '' %}"
    "{% if message['role'] == 'system' %}{{ '<|system|>\\n' + content }}"
    "{% elif message['role'] == 'user' %}{{ ('' if before == 'assistant' else '<|user|>') + '\\n' + content }}"
    "{{ '/nothink' if quiet and not content.endswith('/nothink') }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\\n' + ('' if '</think>' in content else '<think></think>') }}"
    "{{ content if '</think>' in content else '\\n' + content if content }}"
    "{% for call in message['tool_calls'] or [] %}{{ '\\n<tool_call>' + call['function']['name'] + '\\n' }}"
    "{% for key, value in call['function']['arguments'].items() %}{{ '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}"
    "{{ (value if value is string else value | tojson(ensure_ascii=False)) + '</arg_value>\\n' }}{% endfor %}"
    "{{ '</tool_call>' }}{% endfor %}{{ '<|observation|>' if message['tool_calls'] else '<|user|>' }}"
    "{% elif message['role'] == 'tool' %}{{ '' if before in ['assistant', 'tool'] else '<|observation|>' }}"
    "{{ '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}"
    "{% else %}{{ raise_exception('no turns of the role ' + message['role']) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' + ('\\n<think></think>' if quiet else '') }}{% endif %}"
)
"""GLM-4.5, with tools. Its default template ends no turn: the policy stops at the token that opens the next one
(`<|user|>`, after calls `<|observation|>`). In this template each answer ends with that token, including the last
one."""

CHATML = "chatml"
"""Name of the template for tokenizers without one."""
SHIPPED = {"deepseek_r1": DEEPSEEK_R1, "nemotron_3": NEMOTRON_3, "glm_4_5": GLM_4_5}
"""Name in `prepare_data.chat_template` -> template."""

_MARKS = {
    "deepseek_r1": ("<｜User｜>", "<｜Assistant｜>"),
    "nemotron_3": ("<|im_start|>", "<|im_end|>", "<think></think>"),
    "glm_4_5": ("[gMASK]<sop>", "<|user|>", "<|observation|>", "<arg_key>", "<think></think>"),
}
"""The tokens that each template here writes. A model's default template must contain all of them to match."""

_IN_ANSWERS = re.compile(
    r"think|thought|reason|reflect|scratch|plan|search|solution|channel|message|call|function|action|answer|tool.?sep|python",
    re.IGNORECASE,
)

_CLOSES_REASONING = re.compile(r"""\{\{-?\s*['"]</think>""")
"""DeepSeek-V3.1 has the tokens of R1 and opens every answer with `</think>`, as no template here does."""


def shipped_for(template: str) -> str:
    """Find the shipped template whose tokens are all in `template`; "" if none matches.

    >>> shipped_for("{{ '<｜User｜>' }}{{ '<｜Assistant｜><think>' }}")
    'deepseek_r1'
    """
    if _CLOSES_REASONING.search(template):
        return ""
    return next((name for name, marks in _MARKS.items() if all(mark in template for mark in marks)), "")


def other_opening(template: str, asked: str, shown: str) -> tuple[str, str]:
    """Explain why the prompts of `template` are no prefix of the conversation with the answer, as a rule and a remedy.

    `asked` is the text of a conversation with the generation prompt, `shown` the same one with its answer.
    """
    same = common_beginning(asked, shown)
    asks, shows = asked[same:][:40], shown[same:][:40]
    rule = f"prompts for an answer with {asks!r} but renders one with {shows!r}, so there is no exact loss mask"
    shipped = shipped_for(template)
    if shipped and template != SHIPPED[shipped]:
        return rule, f'set prepare_data.chat_template = "{shipped}", whose prompts are prefixes of its conversations'
    return rule, "set prepare_data.chat_template to a template whose prompts are prefixes of its conversations"


def common_beginning(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Count the items that two sequences have in common before the first difference."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


class Decoder:
    """Decodes tokens to a text for people, rewards and files.

    It leaves out begin, end and padding tokens, the ends that a policy declares, and the special tokens that its chat
    template writes around turns. Other special tokens, such as the ones around reasoning and tool calls, are part of
    the answer. `shown` are the ids of these special tokens.
    """

    def __init__(self, tokenizer: Any, *, ends: Iterable[int] = ()) -> None:
        """Render short conversations with the chat template of `tokenizer`, if any, to find its markers."""
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        special = {number for number, token in added if token.special}.union(tokenizer.all_special_ids)
        around = {number for number in _written(tokenizer) if not is_content(_token(tokenizer, number))}
        self._hidden = special & around.union(structure(tokenizer, ends))
        self.shown = frozenset(special - self._hidden)

    def __call__(self, ids: Sequence[int]) -> str:
        """Decode `ids` to text."""
        if self.shown.isdisjoint(ids):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
        kept = [number for number in ids if number not in self._hidden]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))


def is_content(token: str) -> bool:
    """Whether a token, by its name, marks reasoning or a tool call, so that an answer may contain it.

    >>> [is_content(token) for token in ("[THINK]", "<|channel|>", "<scratchpad>", "<|im_end|>", "[TOOL_RESULTS]")]
    [True, True, True, False, False]
    """
    return bool(_IN_ANSWERS.search(token))


def structure(tokenizer: Any, ends: Iterable[int]) -> set[int]:
    """The ids that are never content under any name: begin, end, padding and the declared `ends`."""
    named = (getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos", "pad", "cls", "sep"))
    return {number for number in named if number is not None}.union(ends)


def _written(tokenizer: Any) -> set[int]:
    """The ids that the chat template writes around the turns of a conversation, as far as it renders one."""
    turns = [{"role": role, "content": "Hi"} for role in ("system", "user", "assistant", "user")]
    found: set[int] = set()
    for rows in (turns, turns[1:], turns[1:2]):  # templates may refuse the first turn, or all but one
        # Templates raise any error; without a template, no markers can be found.
        with contextlib.suppress(Exception):
            text = tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=rows[-1]["role"] == "user")
            found.update(tokenizer(text, add_special_tokens=False)["input_ids"])
    return found


def _token(tokenizer: Any, number: int) -> str:
    return str(tokenizer.convert_ids_to_tokens(number))


def vocabulary_rows(policy: Path) -> int | None:
    """The number of tokens that the model in a folder has embeddings for, or None if its `config.json` has none."""
    file = policy / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return config.get("text_config", config).get("vocab_size")  # type: ignore[no-any-return]


def declared_ends(policy: Path) -> set[int]:
    """The ids that the `generation_config.json` and the `config.json` of a policy name as ends of an answer."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = policy / name
        declared = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        if declared is not None:
            ids.update(declared if isinstance(declared, list) else [declared])
    return ids
