"""Two policies of one shape with other weights; heads are 64 wide because vLLM's CPU kernels need that."""

from pathlib import Path

import pytest

from rlhf_core.config.models import InitModel

TEXTS = [
    "What is 12 + 30? It is 42.",
    "Name a colour. Blue is a colour.",
    "Say hello to the reader. Hello, reader!",
] * 5
TINY = InitModel(
    vocab_size=320, hidden_size=128, layers=2, heads=2, kv_heads=2, intermediate_size=256, max_positions=96
)


@pytest.fixture(scope="session")
def policies(tmp_path_factory) -> tuple[Path, Path]:
    from rlhf_core.models.initialize import initialize_llama, train_tokenizer  # imports transformers

    folders = []
    for seed in (7, 8):
        folder = tmp_path_factory.mktemp("policy")
        train_tokenizer(TEXTS, vocab_size=320, folder=folder)
        initialize_llama(TINY, folder, seed=seed)
        folders.append(folder)
    return folders[0], folders[1]
