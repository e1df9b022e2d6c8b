"""Load configurations and tokenizers of model folders. Code in a folder never runs, and nothing is downloaded.

`trust_remote_code` is set wherever a model is loaded: without it, transformers asks at the terminal whether code may run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.errors import ConfigError

# transformers is imported where it is used: it takes five seconds, and agents and reward servers tokenize nothing.


def load_config(folder: Path) -> Any:
    """The configuration of the model in `folder`."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder` (a transformers fast tokenizer). Raises ConfigError if there is none."""
    from transformers import AutoTokenizer

    if not (folder / "tokenizer_config.json").is_file():
        rule = "has no tokenizer_config.json"
        raise ConfigError("tokenizer", str(folder), rule, "give a complete model folder")
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def load_part(auto: Any, source: str, options: Mapping[str, Any]) -> Any:
    """Load with `auto` (AutoConfig, AutoTokenizer, AutoModelForCausalLM) from a folder, a GGUF file or the Hub.

    Some `options` locate it: `gguf_file`, `revision`.
    """
    return auto.from_pretrained(source, trust_remote_code=False, **options)
