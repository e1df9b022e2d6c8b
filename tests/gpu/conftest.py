"""What needs a CUDA device is skipped with a reason where there is none. Models are small enough for any GPU."""

from pathlib import Path

import pytest
import torch

from rlhf_core.config.models import InitModel
from rlhf_core.models.initialize import initialize_llama, train_tokenizer

HERE = Path(__file__).parent
TEXTS = ["What is 12 + 30? It is 42.", "Name a colour. Blue is a colour."] * 5
SMALL = InitModel(
    vocab_size=320, hidden_size=256, layers=2, heads=4, kv_heads=2, intermediate_size=512, max_positions=96
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def policy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    train_tokenizer(TEXTS, vocab_size=320, folder=folder)
    initialize_llama(SMALL, folder, seed=7)
    return folder
