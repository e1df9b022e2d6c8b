"""Check whether two models have the same vocabulary."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from rlhf_core.errors import ConfigError, explain


def shared_vocabulary(student: Path, teacher: Path) -> int:
    """Return the vocabulary size (rows of the LM head) of two policies. Raises ConfigError if the vocabularies differ.

    They are the same if every ID has the same token and the heads have the same width. Heads padded to different sizes
    give distributions over different tokens.
    """
    sizes = [
        int(AutoConfig.from_pretrained(str(folder), local_files_only=True).get_text_config().vocab_size)
        for folder in (student, teacher)
    ]
    if sizes[0] != sizes[1]:
        rule = f"its vocabulary has {sizes[1]} tokens, the student's has {sizes[0]}"
        raise ConfigError(explain("teacher", str(teacher), rule, "use a teacher with the student's tokenizer"))
    ours, theirs = (
        AutoTokenizer.from_pretrained(str(folder), local_files_only=True).get_vocab() for folder in (student, teacher)
    )
    if ours != theirs:
        differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        rule = f"{len(differing)} tokens have other ids than in the student's tokenizer, for example {differing[0]!r}"
        raise ConfigError(explain("teacher", str(teacher), rule, "use a teacher with the student's tokenizer"))
    return sizes[0]
