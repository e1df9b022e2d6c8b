"""Code in a model folder never runs, and transformers never asks whether it may."""

import ast
import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.models.architecture import read_config
from rlhf_core.pretrained import load_config, load_tokenizer

ROOT = Path(__file__).parents[2]
LOADS = ("from_pretrained", "from_config")


def direct_loads(source: str, *, is_loader: bool) -> list[str]:
    """The calls in Python code that load a part of a model and could run its code, or that load around `pretrained`."""
    found = []
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr not in LOADS:
            continue
        loader = ast.unparse(call.func.value)
        safe = any(one.arg == "trust_remote_code" and ast.unparse(one.value) == "False" for one in call.keywords)
        around = loader in ("AutoConfig", "AutoTokenizer") and not is_loader
        if loader != "GenerationConfig" and (around or not safe):
            found.append(ast.unparse(call))
    return found


def test_every_part_of_a_model_is_loaded_without_its_code():
    files = [
        path
        for folder in ("rlhf_core", "stages", "pipelines", "rlhf_contrib")
        for path in (ROOT / folder).rglob("*.py")
    ]
    found = {
        str(path): calls
        for path in files
        if (calls := direct_loads(path.read_text(), is_loader=path == ROOT / "rlhf_core" / "pretrained.py"))
    }
    assert len(files) > 100 and not found


@pytest.mark.parametrize(
    "call",
    [
        "AutoConfig.from_pretrained(folder, trust_remote_code=False)",
        "AutoTokenizer.from_pretrained(folder, trust_remote_code=False)",
        "AutoModel.from_pretrained(folder)",
        "AutoModel.from_pretrained(folder, trust_remote_code=given)",
        "transformers.AutoProcessor.from_pretrained(folder, **options)",
        "auto.from_config(config)",
    ],
)
def test_the_search_finds_calls_that_could_run_code(call):
    assert direct_loads(call, is_loader=False) == [call]


@pytest.mark.parametrize("load", [load_config, load_tokenizer, read_config])
def test_code_in_a_folder_does_not_run_even_if_the_terminal_says_yes(tmp_path, monkeypatch, policy, load):
    ran, asked = tmp_path / "ran", []
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "code.py").write_text(
        f"from pathlib import Path\nfrom transformers import PretrainedConfig, PreTrainedTokenizerFast\n"
        f"Path({str(ran)!r}).touch()\nclass Config(PretrainedConfig): model_type = 'mine'\n"
        "class Tokenizer(PreTrainedTokenizerFast): pass\n"
    )
    (folder / "tokenizer.json").write_bytes((policy / "tokenizer.json").read_bytes())
    config: dict[str, Any] = {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": [None, "code.Tokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    monkeypatch.setattr(builtins, "input", lambda *question: asked.append(question) or "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(Exception, match=r"trust_remote_code|custom code"):
        load(folder)
    assert not ran.exists() and not asked
