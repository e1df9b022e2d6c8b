"""The flavor with which MLflow loads a registered policy: from its folder in the store, which MLflow does not copy.

    model = mlflow.pyfunc.load_model("models:/rlhf-policy@champion")
    model.predict([{"role": "user", "content": "Where is my parcel?"}], params={"max_new_tokens": 32})

MLflow imports this module in the process that loads the model.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import ArtifactError
from rlhf_core.tracking.policy_reference import REFERENCE
from rlhf_core.types import Message


class PolicyModel:
    """A policy that answers conversations."""

    def __init__(self, folder: Path) -> None:
        self.chat = ChatTemplate.load(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), local_files_only=True, use_safetensors=True, dtype="auto", trust_remote_code=False
        ).eval()

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> list[str]:
        """Generate an answer to each conversation; `params` are passed to `generate` of transformers.

        `model_input` is one conversation (a list of messages), a list of conversations, texts of users, or a DataFrame
        whose first column holds any of these.
        """
        return [self._answer(messages, dict(params or {})) for messages in read_conversations(model_input)]

    def _answer(self, messages: Sequence[Mapping[str, str]], params: dict[str, Any]) -> str:
        turns = [Message(one["role"], one["content"]) for one in messages]
        prompt = torch.tensor([self.chat.prompt_ids(turns)])
        out = self.model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **params)
        return self.chat.decode(out[0, prompt.shape[1] :].tolist())


def read_conversations(model_input: Any) -> list[list[Mapping[str, str]]]:
    """Parse the conversations that MLflow was given.

    >>> read_conversations("Hi") == read_conversations([{"role": "user", "content": "Hi"}])
    True
    """
    if hasattr(model_input, "iloc"):
        model_input = list(model_input.iloc[:, 0])
    if isinstance(model_input, str):
        return [[{"role": "user", "content": model_input}]]
    entries = list(model_input)
    if entries and all(isinstance(entry, Mapping) for entry in entries):
        return [entries]
    return [conversation for entry in entries for conversation in read_conversations(entry)]


def _load_pyfunc(path: str) -> PolicyModel:
    """Load the policy that the file in `path` refers to: the function that MLflow calls."""
    file = Path(path) / REFERENCE if Path(path).is_dir() else Path(path)
    folder = Path(json.loads(file.read_text(encoding="utf-8"))["folder"])
    if not folder.is_dir():
        remedy = "load it where the store has this path, or make the policy again"
        raise ArtifactError("policy", str(folder), "the weights are not here; MLflow keeps no copy", remedy)
    return PolicyModel(folder)
