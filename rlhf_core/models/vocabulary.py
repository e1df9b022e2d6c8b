"""Check whether two models have the same vocabulary."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from rlhf_core.errors import ConfigError, explain

REMEDY = 'use a teacher with the student\'s tokenizer, or compare the two across tokenizers: divergence.kind = "uld_text" or "uld"'


def shared_vocabulary(student: Path, teacher: Path, *, key: str = "teacher") -> int:
    """Return the vocabulary size (rows of the LM head) of two policies. Raises ConfigError if the vocabularies differ.

    `key` is the teacher's name in the error.

    They are the same if every ID has the same token and the heads have the same width. Heads padded to different sizes
    give distributions over different tokens.
    """
    sizes = [vocabulary_size(folder) for folder in (student, teacher)]
    if sizes[0] != sizes[1]:
        rule = f"its vocabulary has {sizes[1]} tokens, the student's has {sizes[0]}"
        raise ConfigError(explain(key, str(teacher), rule, REMEDY))
    ours, theirs = (
        AutoTokenizer.from_pretrained(str(folder), local_files_only=True).get_vocab() for folder in (student, teacher)
    )
    if ours != theirs:
        differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        rule = f"{len(differing)} tokens have other ids than in the student's tokenizer, for example {differing[0]!r}"
        raise ConfigError(explain(key, str(teacher), rule, REMEDY))
    return sizes[0]


def vocabulary_size(policy: Path) -> int:
    """Return the vocabulary size of a policy: the rows of its LM head."""
    return int(AutoConfig.from_pretrained(str(policy), local_files_only=True).get_text_config().vocab_size)
