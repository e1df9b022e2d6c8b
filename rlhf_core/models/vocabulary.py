"""Whether two models speak of the same tokens."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.errors import ConfigError, explain


def shared_vocabulary(student: Path, teacher: Path) -> int:
    """Return the size of the vocabulary (rows of the LM head) of two policies; ConfigError if it is not the same one.

    Same means the same token under the same id, and heads of the same width: padded to different sizes, they are
    distributions over different tokens.
    """
    from transformers import AutoConfig, AutoTokenizer

    sizes = [
        int(AutoConfig.from_pretrained(str(folder), local_files_only=True).get_text_config().vocab_size)
        for folder in (student, teacher)
    ]
    if sizes[0] != sizes[1]:
        rule = f"its vocabulary has {sizes[1]} tokens and the student's {sizes[0]}"
        raise ConfigError(explain("teacher", str(teacher), rule, "take a teacher with the student's tokenizer"))
    ours, theirs = (
        AutoTokenizer.from_pretrained(str(folder), local_files_only=True).get_vocab() for folder in (student, teacher)
    )
    if ours != theirs:
        differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        rule = f"{len(differing)} tokens have another id than in the student's tokenizer, {differing[0]!r} for one"
        raise ConfigError(explain("teacher", str(teacher), rule, "take a teacher with the student's tokenizer"))
    return sizes[0]
