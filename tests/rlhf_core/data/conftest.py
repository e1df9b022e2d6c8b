"""A tiny tokenizer of our own kind, and one whose turns end with a newline after EOS as ChatML's do."""

from pathlib import Path

import pytest

from rlhf_core.data.chat import CHATML_LIKE, ChatTemplate

TEXTS = ["Hello Maria, how are you?", "I am sorry. Thank you for writing.", "What is 12 + 30?", "12 + 30 = 42"] * 5


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory) -> Path:
    from rlhf_core.models.initialize import train_tokenizer  # imports transformers

    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, vocab_size=320, folder=folder)
    return folder


@pytest.fixture(scope="session")
def chat(chat_folder: Path) -> ChatTemplate:
    return ChatTemplate.load(chat_folder)


@pytest.fixture(scope="session")
def chatml(chat_folder: Path) -> ChatTemplate:
    tokenizer = ChatTemplate.load(chat_folder).tokenizer
    tokenizer.chat_template = CHATML_LIKE
    return ChatTemplate(tokenizer)
