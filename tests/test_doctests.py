"""Every example in a docstring is run, or is named here with what it needs.

One process imports the modules that have examples, and neither vLLM nor DeepSpeed: an example that needs one is marked
`# doctest: +SKIP`.
"""

import ast
import doctest
import importlib
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rlhf_contrib", "pipelines", "stages", "rlhf_core", "benchmarks", "campaigns", "docs")
SKIPPED = {
    "pipelines.flows.graph": (1, "a pipeline and artifacts"),
    "rlhf_core.agents.endpoint": (1, "an event loop and a policy that samples"),
    "rlhf_core.agents.process": (1, "processes of environments and a policy's tokenizer"),
    "rlhf_core.agents.programs": (1, "an event loop and a policy that samples"),
    "rlhf_core.schema.base": (2, "an annotation, shown as it stands in a class"),
    "rlhf_core.schema.secrets": (1, "an annotation, shown as it stands in a class"),
    "rlhf_core.data.chat": (1, "a policy's tokenizer"),
    "rlhf_core.data.tables": (1, "a policy's tokenizer"),
    "rlhf_contrib.sandbox.fusion": (1, "a server of SandboxFusion"),
    "rlhf_core.rollouts.answers": (1, "a policy that samples"),
    "rlhf_core.runtime.worker_group": (2, "workers of Ray"),
    "rlhf_core.runtime.liveness": (1, "a cluster of Ray"),
    "rlhf_core.runtime.local_runtime": (1, "the engine torch"),
    "rlhf_core.runtime.ray_runtime": (2, "a cluster of Ray"),
    "rlhf_core.sampling.hf_sampler": (1, "a policy's weights"),
    "rlhf_core.sampling.vllm_sampler": (2, "vLLM"),
    "rlhf_contrib.vllm_server.sampler": (1, "a server of vLLM"),
    "rlhf_core.training.trainer": (2, "a policy's weights"),
}
"""Module -> how many of its examples are skipped, and what each of them needs."""


def has_examples(path: Path) -> bool:
    """Return whether a docstring of the file has an example, without importing it."""
    if ">>> " not in path.read_text():
        return False
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented)]
    return any(">>> " in (ast.get_docstring(node, clean=False) or "") for node in nodes)


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = [
    dotted(path) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if has_examples(path)
]


def examples_of(module: ModuleType) -> list[doctest.DocTest]:
    return [test for test in doctest.DocTestFinder().find(module, module.__name__) if test.examples]


def failures(module: ModuleType) -> str:
    """Return what doctest says of the examples that are wrong, "" if none is."""
    said: list[str] = []
    for test in examples_of(module):
        doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    return "".join(said)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_are_true(name):
    assert failures(importlib.import_module(name)) == ""


def test_what_is_skipped_is_named_with_its_reason():
    skipped = Counter(
        name
        for name in MODULES
        for test in examples_of(importlib.import_module(name))
        for example in test.examples
        if example.options.get(doctest.SKIP)
    )
    assert dict(skipped) == {name: count for name, (count, _) in SKIPPED.items()}


def test_every_example_in_a_file_is_found_by_doctest():
    """An example in a string that is no docstring, or under a decorator that hides it, would never be run."""
    for name in MODULES:
        module = importlib.import_module(name)
        written = sum(line.strip().startswith(">>> ") for line in Path(module.__file__).read_text().splitlines())
        assert sum(len(test.examples) for test in examples_of(module)) == written, name


def test_a_wrong_example_would_be_noticed():
    module = ModuleType("wrong")
    exec(
        'def double(x):\n    """Return twice x.\n\n    >>> double(2)\n    5\n    """\n    return 2 * x\n', vars(module)
    )
    assert "Expected:\n    5\nGot:\n    4" in failures(module)
