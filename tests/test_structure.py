"""The tests mirror the tree: `rlhf_core/store/leases.py` is tested by `tests/rlhf_core/store/test_leases.py`."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pipelines", "stages", "rlhf_core")

TESTED_THROUGH = {
    "rlhf_core/config/measured.py": "rlhf_core/config/test_policy.py",
    "pipelines/cli/key_metric.py": "pipelines/cli/test_display.py",
    "pipelines/cli/common.py": "pipelines/cli/test_main.py",
    "pipelines/importers/openrlhf/conditions.py": "pipelines/importers/openrlhf/test_shell.py",
    "pipelines/importers/openrlhf/expansion.py": "pipelines/importers/openrlhf/test_shell.py",
    "pipelines/importers/openrlhf/scanner.py": "pipelines/importers/openrlhf/test_shell.py",
    "pipelines/importers/openrlhf/syntax.py": "pipelines/importers/openrlhf/test_shell.py",
    "pipelines/cli/import_openrlhf.py": "pipelines/importers/openrlhf/test_importing.py",
    "pipelines/cli/diff_verb.py": "pipelines/execution/test_diff.py",
    "pipelines/cli/reproduce_verb.py": "pipelines/execution/test_reproduce.py",
    "pipelines/cli/sweep_runs.py": "pipelines/cli/test_sweep_verb.py",
    "pipelines/cli/champion_verbs.py": "pipelines/execution/test_champion.py",
    "pipelines/cli/gate_verbs.py": "pipelines/execution/test_approving.py",
    "pipelines/cli/plan_verbs.py": "pipelines/cli/test_main.py",
    "pipelines/cli/recovery_verbs.py": "pipelines/cli/test_main.py",
    "pipelines/cli/services_verbs.py": "pipelines/services/test_servers.py",
    "pipelines/cli/store_lists.py": "pipelines/cli/test_main.py",
    "pipelines/cli/store_verbs.py": "pipelines/cli/test_main.py",
    "pipelines/execution/lazy_runtime.py": "pipelines/execution/test_opening.py",
    "pipelines/execution/executor.py": "pipelines/execution/test_run.py",
    "pipelines/execution/listener.py": "pipelines/execution/test_run.py",
    "pipelines/execution/local.py": "pipelines/execution/test_run.py",
    "pipelines/execution/tracker.py": "pipelines/execution/test_run.py",
    "pipelines/flows/run_rules.py": "pipelines/execution/test_gates.py",
    "pipelines/flows/sections.py": "pipelines/flows/test_profile.py",
    "pipelines/prefect_flows/approval_flow.py": "pipelines/prefect_flows/test_tasks.py",
    "pipelines/prefect_flows/pipeline_flows.py": "pipelines/prefect_flows/test_deployments.py",
    "pipelines/prefect_flows/stage_flows.py": "pipelines/prefect_flows/test_deployments.py",
    "pipelines/services/mlflow_server.py": "pipelines/services/test_servers.py",
    "pipelines/services/prefect_server.py": "pipelines/services/test_servers.py",
    "pipelines/services/sign_in.py": "pipelines/cli/test_main.py",
    "rlhf_core/rewards/chat.py": "rlhf_core/rewards/test_judge.py",
    "rlhf_core/annotation/comparisons.py": "rlhf_core/annotation/test_proposing.py",
    "rlhf_core/config/annotators.py": "rlhf_core/annotation/test_annotators.py",
    "rlhf_core/config/policy_parts.py": "rlhf_core/config/test_policy.py",
    "rlhf_core/config/monitors.py": "rlhf_core/rollouts/test_guard.py",
    "rlhf_core/monitoring/base.py": "rlhf_core/monitoring/test_bands.py",
    "rlhf_core/algorithms/lazy_torch.py": "rlhf_core/algorithms/test_methods.py",
    "rlhf_core/http/body.py": "rlhf_core/rewards/test_server.py",
    "rlhf_core/http/serving.py": "rlhf_core/rewards/test_server.py",
    "rlhf_core/sampling/vllm_front.py": "pipelines/services/test_policy_server.py",
    "rlhf_core/models/head_pass.py": "rlhf_core/models/test_forward.py",
    "rlhf_core/data/worlds/instruction_answers.py": "rlhf_core/data/worlds/test_instruction_writer.py",
    "rlhf_core/data/worlds/instruction_phrases.py": "rlhf_core/data/worlds/test_instructions.py",
    "rlhf_core/data/detection.py": "rlhf_core/data/test_formats.py",
    "rlhf_core/data/file_types.py": "rlhf_core/data/test_sources.py",
    "rlhf_core/data/values.py": "rlhf_core/data/test_formats.py",
    "rlhf_core/rewards/external.py": "stages/test_import_reward_model.py",
    "rlhf_core/rewards/model_inputs.py": "rlhf_core/rewards/test_scoring.py",
    "rlhf_core/runtime/devices.py": "rlhf_core/runtime/test_train_worker.py",
    "rlhf_core/runtime/hosted_models.py": "rlhf_core/runtime/test_train_worker.py",
    "rlhf_core/runtime/vllm_transfer.py": "rlhf_core/runtime/test_weight_sync.py",
    "rlhf_core/sampling/vllm_engine.py": "rlhf_core/sampling/test_vllm_sampler.py",
    "rlhf_core/schema/custom.py": "rlhf_core/config/test_preference.py",
    "rlhf_core/stage/context.py": "rlhf_core/stage/test_run.py",
    "rlhf_core/store/object_check.py": "rlhf_core/store/test_damage.py",
    "rlhf_core/store/typed_json.py": "rlhf_core/store/test_records.py",
    "rlhf_core/tracking/policy_model.py": "rlhf_core/tracking/test_policy_reference.py",
    "pipelines/cli/serve_verb.py": "pipelines/services/test_policy_server.py",
    "rlhf_core/user_code/sources.py": "rlhf_core/user_code/test_dependencies.py",
    "rlhf_core/tracking/champion_tags.py": "rlhf_core/tracking/test_champions.py",
    "rlhf_core/suites/harness.py": "stages/test_evaluate_harness.py",
    "rlhf_core/suites/harness_results.py": "stages/test_evaluate_harness.py",
    "rlhf_core/suites/phrases.py": "rlhf_core/suites/test_refusal.py",
    "rlhf_core/suites/report.py": "stages/test_report_suites.py",
    "rlhf_core/training/engines/offload.py": "rlhf_core/training/engines/test_deepspeed_engine.py",
} | dict.fromkeys(
    (
        f"pipelines/importers/openrlhf/{name}.py"
        for name in (
            *("arguments", "data_rules", "draft", "flags", "offline_rules", "policy_rules", "report", "rollout_rules"),
            *("toml", "training_rules", "treatments"),
        )
    ),
    "pipelines/importers/openrlhf/test_translate.py",
)
"""Module -> the tests of the module that it is a part of, which go through it."""

FOLDERS_TESTED_THROUGH = {
    "rlhf_core/algorithms/advantage": "rlhf_core/algorithms/advantage/test_base.py",
    "rlhf_core/algorithms/policy": "rlhf_core/algorithms/policy/test_clip.py",
    "rlhf_core/algorithms/preference": "rlhf_core/algorithms/preference/test_dpo.py",
    "stages/config": "pipelines/flows/test_profile.py",
}
"""Folder of small modules of one kind -> the tests that try each of them, beside tests of some alone."""

OF_SEVERAL_MODULES = {
    "pipelines/test_doors.py": "every route of every server, against strangers",
    "pipelines/test_foreign_page.py": "a web page of others against all servers",
    "pipelines/test_gates_page.py": "a gate in Prefect's page, and the run that waits for the answer",
    "pipelines/test_people_page.py": "people at MLflow's Review page, and the run that waits for them",
    "pipelines/test_ray_jobs.py": "a pipeline as jobs of a real Ray",
    "pipelines/test_secrets.py": "a secret through a whole run",
    "pipelines/test_waiting_runs.py": "runs that are killed while they wait, or while a question or an answer is written",
    "pipelines/test_wheel.py": "the wheel, installed without the clone",
    "rlhf_core/algorithms/test_invariances.py": "what all losses have in common",
    "rlhf_core/rewards/library/test_contract.py": "what all rewards of the library have in common",
    "rlhf_core/runtime/test_made_up_gpus.py": "placement on a Ray that is told of GPUs",
    "rlhf_core/sampling/test_vllm_prefixes.py": "prefix caching of both vLLM samplers",
    "rlhf_core/sampling/test_vllm_requests.py": "what vLLM does with our requests",
    "rlhf_core/sampling/test_vllm_serve.py": "a real `vllm serve`",
    "rlhf_core/training/test_bfloat16.py": "training in bfloat16, on both engines",
    "rlhf_core/training/test_tensor_parallel_families.py": "tensor parallelism of several architectures",
    "rlhf_core/training/test_wide_head.py": "a vocabulary that is wider than memory",
    "stages/test_add_a_stage.py": "the page docs/add_a_stage.md",
    "stages/test_custom.py": "the page docs/custom.md",
    "stages/test_external_agents.py": "agents of other programs",
    "stages/test_external_rewards.py": "reward functions of other programs",
    "stages/test_invariants.py": "sampler, trainer and weights against each other, in one process",
    "stages/test_invariants_engines.py": "the same, with the real engines",
}
"""Tests that belong to no single module -> what they test."""

FIXTURES_OF_ALL = ("policy", "store", "home")
OF_THEIR_OWN = {
    ("gpu/conftest.py", "policy"): "heads as wide as the kernels of a GPU want them",
    ("pipelines/conftest.py", "home"): "the one place where it is defined",
    ("rlhf_core/store/test_index.py", "store"): "with two artifacts in it",
    ("stages/test_invariants_engines.py", "policy"): "heads as wide as vLLM's kernels want them",
}
"""(file, fixture) -> why it is not the one of tests/conftest.py."""


def modules() -> list[str]:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [path.relative_to(ROOT).as_posix() for path in files if path.name != "__init__.py"]


def is_covered(module: str) -> bool:
    return module in TESTED_THROUGH or str(Path(module).parent) in FOLDERS_TESTED_THROUGH


def own_tests(module: str) -> list[Path]:
    """Return the tests beside the module's place in the tree: test_<name>.py, or test_<name>_<part>.py."""
    folder = (ROOT / "tests" / module).parent
    return [*folder.glob(f"test_{Path(module).stem}.py"), *folder.glob(f"test_{Path(module).stem}_*.py")]


def test_every_module_has_tests_in_its_place_or_is_tested_through_another() -> None:
    assert [module for module in modules() if not own_tests(module) and not is_covered(module)] == []


def test_the_list_of_modules_tested_through_others_is_current() -> None:
    present = set(modules())
    gone = [module for module in TESTED_THROUGH if module not in present or own_tests(module)]
    assert gone == []
    assert [folder for folder in FOLDERS_TESTED_THROUGH if not (ROOT / folder).is_dir()] == []
    named = [*TESTED_THROUGH.values(), *FOLDERS_TESTED_THROUGH.values()]
    assert [tests for tests in named if not (ROOT / "tests" / tests).is_file()] == []


def test_every_file_of_tests_belongs_to_a_module_or_says_what_it_tests() -> None:
    mirrored = {path.relative_to(ROOT / "tests").as_posix() for module in modules() for path in own_tests(module)}
    files = [path for package in PACKAGES for path in (ROOT / "tests" / package).rglob("test_*.py")]
    found = {path.relative_to(ROOT / "tests").as_posix() for path in files}
    assert found - mirrored == set(OF_SEVERAL_MODULES)


@pytest.mark.parametrize("name", FIXTURES_OF_ALL)
def test_fixtures_that_many_tests_need_are_defined_once(name: str) -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if f"def {name}(" in path.read_text()]
    owners = Counter(path.relative_to(ROOT / "tests").as_posix() for path in files if defines_fixture(path, name))
    allowed = {file for file, fixture in OF_THEIR_OWN if fixture == name} | {"conftest.py"}
    assert set(owners) <= allowed


def defines_fixture(path: Path, name: str) -> bool:
    return any(
        isinstance(node, ast.FunctionDef)
        and node.name == name
        and any("fixture" in ast.unparse(decorator) for decorator in node.decorator_list)
        for node in ast.parse(path.read_text()).body
    )


def without_encoding(module: str) -> list[str]:
    """Return the calls in a module that open a file of text in the encoding of whoever runs it."""
    found = []
    for call in ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8"))):
        if isinstance(call, ast.Call) and not any(keyword.arg == "encoding" for keyword in call.keywords):
            name = ast.unparse(call.func).rpartition(".")[2]
            modes = [mode.value for mode in call.args[:2] if isinstance(mode, ast.Constant)]
            text = any(str(mode) in ("r", "w", "a", "x", "rt", "wt", "r+", "w+", "a+") for mode in modes)
            ours = ast.unparse(call.func) == "write_text"  # of rlhf_core.store.layout, in UTF-8
            if (name in ("read_text", "write_text", "FileHandler") and not ours) or (
                name in ("open", "fdopen") and text
            ):
                found.append(f"{module}:{call.lineno}")
    return found


def test_files_of_text_are_in_utf_8_wherever_we_run() -> None:
    """Ruff's PLW1514 sees only those whose paths it can tell to be paths."""
    others = [
        path.relative_to(ROOT).as_posix() for name in ("benchmarks", "docs") for path in (ROOT / name).rglob("*.py")
    ]
    assert [call for module in (*modules(), *others) for call in without_encoding(module)] == []
