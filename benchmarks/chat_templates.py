"""Show how chat templates are trained on: `python -m benchmarks.chat_templates [a Jinja file or a folder of them ...]`.

Prints a row for each template: one example per conversation, one per answer (if the template rewrites earlier turns),
or the reason for rejecting it; both without and with reasoning in the answers. Each example is checked: the tokens
before an answer must be the sampler's prompt, and the answer must end with its end-of-turn token. Without arguments,
the templates are small ones with the habits of current models, Llama 4's template from the installed transformers, and
the shipped ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.chat_templates import SHIPPED
from rlhf_core.errors import RlhfError
from rlhf_core.types import Column, Message, TokenSample

ENDS = (
    *(
        "<|im_end|>",
        "<|eot_id|>",
        "<|eot|>",
        "<|end|>",
        "<end_of_turn>",
        "<turn|>",
        "<|return|>",
        "<｜end▁of▁sentence｜>",
    ),
    *("<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<|endoftext|>"),
    *("<|user|>", "<|observation|>"),
)
"""End-of-turn tokens of current models; a policy's folder declares its own."""

_OPENED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
HABITS = {
    "keeps every turn": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "drops earlier reasoning, adds an empty one": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
        "{% if m['role'] == 'assistant' and loop.last and '</think>' not in m['content'] %}"
        "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
        "{{ m['content'] if loop.last else m['content'].split('</think>')[-1].lstrip('\\n') }}{{ '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "ends the text, not the turn, with its EOS": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
        "{{ '<|assistant|>\\n' if add_generation_prompt else '<|endoftext|>' }}"
    ),
    "opens a reasoning that it never shows": (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% else %}"
        "{{ '<｜Assistant｜>' + m['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
    ),
    "opens a reasoning, shows an empty one": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
        "{% if m['role'] == 'assistant' and '</think>' not in m['content'] %}{{ '<think></think>' }}{% endif %}"
        "{{ m['content'] + '<|im_end|>\\n' }}{% endfor %}" + _OPENED
    ),
}
"""Behavior of a template -> a small template with this behavior."""

PLAIN = (
    Message("user", "What is 12 + 30?"),
    Message("assistant", "42"),
    Message("user", "And doubled?"),
    Message("assistant", "84"),
)
REASONED = tuple(
    Message(one.role, f"<think>\nLet me add.\n</think>\n\n{one.content}") if one.role == "assistant" else one
    for one in PLAIN
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chat_templates", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("paths", nargs="*", type=Path, help="Jinja files, or folders of them")
    asked = parser.parse_args(arguments)
    console = Console(soft_wrap=True)
    console.print("| template | without reasoning | with reasoning |\n|---|---|---|", markup=False)
    for name, template in templates(asked.paths):
        console.print(f"| {name} | {outcome(template, PLAIN)} | {outcome(template, REASONED)} |", markup=False)


def templates(paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield name and text of the templates in `paths`; without any, of `HABITS`, Llama 4 and the shipped templates."""
    if not paths:
        yield from HABITS.items()
        yield "Llama 4", llama_4()
        yield from ((f"shipped: {name}", template) for name, template in SHIPPED.items())
    for path in paths:
        for file in sorted(path.glob("*.jinja")) if path.is_dir() else [path]:
            yield file.stem, file.read_text(encoding="utf-8")


def llama_4() -> str:
    """The template of Llama 4 from the installed transformers, the only model template that it includes."""
    # The import takes 10 s, and other templates do not need it.
    from transformers.models.llama4.processing_llama4 import chat_template

    return str(chat_template)


def outcome(template: str, messages: Sequence[Message]) -> str:
    """Describe how the conversation is trained on with `template`, or why it is rejected."""
    try:
        chat = ChatTemplate(tokenizer(template), ends=end_ids(tokenizer(template)))
        samples = chat.examples(messages, max_length=1 << 20)
    except RlhfError as error:
        return f"refused: {error}".replace("|", "\\|")
    if not exact(chat, messages, samples):
        return "NOT EXACT"
    if not all(_says(chat, samples, one.content) for one in messages if one.role == "assistant"):
        return "exact, but the template leaves out words of an answer"
    return "one example" if len(samples) == 1 else "an example for each answer"


def exact(chat: ChatTemplate, messages: Sequence[Message], samples: Sequence[TokenSample]) -> bool:
    """Whether each answer follows the sampler's prompt and ends with the end of its turn."""
    answers = [at for at, message in enumerate(messages) if message.role == "assistant"]
    found = [span for sample in samples for span in spans(sample)]
    return len(found) == len(answers) and all(
        before == chat.prompt_ids(messages[:at]) and said[-1] == chat.eos_id
        for at, (before, said) in zip(answers, found, strict=True)
    )


def spans(sample: TokenSample) -> Iterator[tuple[Column[int], Column[int]]]:
    """Yield, for each run of trained tokens, all tokens before it and the run."""
    start = 0
    for trained, run in groupby(sample.loss_mask):
        end = start + len(list(run))
        if trained:
            yield sample.token_ids[:start], sample.token_ids[start:end]
        start = end


def tokenizer(template: str) -> Any:
    """A byte-level tokenizer with the end tokens of current models and `template`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    made.add_special_tokens({"additional_special_tokens": list(ENDS)})
    made.chat_template = template
    return made


def end_ids(made: Any) -> list[int]:
    """The ids of the end tokens."""
    return [int(made.convert_tokens_to_ids(token)) for token in ENDS]


def _says(chat: ChatTemplate, samples: Sequence[TokenSample], content: str) -> bool:
    """Whether an answer's words are trained on; the reasoning may have been opened by the prompt."""
    said = [chat.tokenizer.decode(run) for sample in samples for _, run in spans(sample)]
    return any(content.removeprefix("<think>\n") in text for text in said)


if __name__ == "__main__":
    main()
