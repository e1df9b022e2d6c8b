"""A pytest plugin: Ray, a Prefect server and warm parents of engines serve all tests that need one.

Files that share one run one after the other, under xdist in one worker. It ends after the last of them, because it takes
memory, and CPU seconds while it waits. A test that starts, loses or ends a Ray or a server has a separate one.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from rlhf_core.config.runtime import RuntimeConfig
    from rlhf_core.runtime.ray_runtime import RayRuntime

T = TypeVar("T")
SHARING = {
    "shared_ray": (
        "tests/rlhf_core/runtime/test_ray_runtime.py",
        "tests/rlhf_core/runtime/test_worker_group.py",
        "tests/stages/test_invariants_engines.py",
    ),
    "prefect_home": (
        "tests/pipelines/cli/test_python.py::test_the_cells_of_the_notebook_run_as_in_jupyter",
        "tests/pipelines/cli/test_run_command.py",
        "tests/pipelines/execution/test_progress_lines.py::test_prefect_shows_the_lines_of_a_run",
        "tests/pipelines/execution/test_resume.py",
        "tests/pipelines/prefect_flows/test_deployments.py",
        "tests/pipelines/prefect_flows/test_tasks.py",
        "tests/pipelines/prefect_flows/test_waiting.py",
        "tests/pipelines/services/test_flow_runs.py",
        "tests/pipelines/services/test_handover.py::test_a_server_stays_at_the_address_until_the_run_ends",
        "tests/pipelines/services/test_running.py",
        "tests/pipelines/services/test_servers.py",
        "tests/pipelines/test_doors.py",
        "tests/pipelines/test_finished_runs.py",
        "tests/pipelines/test_foreign_page.py",
        "tests/pipelines/test_gates_page.py",
        "tests/pipelines/test_own_deployments.py",
        "tests/pipelines/test_people_page.py",
        "tests/pipelines/test_secrets.py",
        "tests/pipelines/test_work_pools.py",
    ),
    "the parent of DeepSpeed": (
        "tests/rlhf_core/training/engines/test_deepspeed_engine.py",
        "tests/rlhf_core/training/engines/test_tensor_parallel.py",
        "tests/rlhf_core/training/test_bfloat16.py",
        "tests/rlhf_core/training/test_sequence_parallel.py",
        "tests/rlhf_core/training/test_wide_head.py",
        "tests/support/test_warm_programs.py",
    ),
    "the parent of vLLM": (
        "tests/rlhf_core/runtime/test_weight_sync.py",
        "tests/rlhf_core/sampling/test_vllm_prefixes.py",
        "tests/rlhf_core/sampling/test_vllm_sampler.py",
        "tests/rlhf_core/sampling/test_vllm_serve.py",
    ),
}
"""A fixture, or a parent of `tests/support/warm_programs.py` -> the files and tests that share it."""
_GROUPS = {place: name for name, places in SHARING.items() for place in places}


# ---------------------------------------------------------------- order


def group_of(nodeid: str) -> str:
    """The name in `SHARING` under which a test is listed, or else its file."""
    file, test = nodeid.partition("::")[0], nodeid.partition("[")[0]
    return _GROUPS.get(test, _GROUPS.get(file, file))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files of a group one after the other, in the place of the first of them."""
    places: dict[str, int] = {}
    missing: list[tuple[str, str]] = []
    for item in items:
        group = group_of(item.nodeid)
        places.setdefault(group, len(places))
        used = SHARING.keys() & {*getattr(item, "fixturenames", ())}
        missing += [(item.nodeid, name) for name in used - {group}]
    if missing:
        raise pytest.UsageError(f"add to {__name__}.SHARING the files or tests that use its fixtures: {missing}")
    items.sort(key=lambda item: places[group_of(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the files of a group to one worker, as `--dist loadfile` gives the tests of a file to one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadGroupOfFiles(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return LoadGroupOfFiles(config, log)


# ---------------------------------------------------------------- shared values


class _Shares:
    """What has been started, by the name of its fixture."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.ending = ExitStack()


_SHARES = pytest.StashKey[_Shares]()


def share(session: pytest.Session, name: str, start: Callable[[], AbstractContextManager[T]]) -> T:
    """The value of `start`, called by the first test of the group `name`; it ends after the last of them."""
    found = session.stash.setdefault(_SHARES, _Shares())
    if name not in found.values:
        found.values[name] = found.ending.enter_context(start())
    value: T = found.values[name]
    return value


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End the values that a group shares after its last test."""
    try:
        return (yield)
    finally:
        if nextitem is None or group_of(nextitem.nodeid) != group_of(item.nodeid):
            found = item.session.stash.get(_SHARES, _Shares())
            item.session.stash[_SHARES] = _Shares()
            if "tests.support.warm_programs" in sys.modules:
                found.ending.callback(sys.modules["tests.support.warm_programs"].end_parents)
            found.ending.close()


class SharedRay:
    """Ray without GPUs, which the runtimes of this process join, and the runtimes that tests share."""

    def __init__(self, ending: ExitStack) -> None:
        self._ending = ending
        self._runtimes: dict[str, RayRuntime] = {}

    def runtime(self, config: "RuntimeConfig") -> "RayRuntime":
        """The runtime of `config`, whose workers stay warm for the next test. No test may break them."""
        from rlhf_core.runtime.ray_runtime import RayRuntime

        key = config.model_dump_json()
        if key not in self._runtimes:
            self._runtimes[key] = RayRuntime(config)
            self._ending.callback(self._runtimes[key].close)
        return self._runtimes[key]


@contextmanager
def _start_ray() -> Iterator[SharedRay]:
    from rlhf_core.runtime.connection import connect
    from rlhf_core.runtime.ray_settings import ray

    with ExitStack() as ending:
        if connect(cores=2):
            ending.callback(ray.shutdown)
        yield SharedRay(ending)


@pytest.fixture(scope="module")
def shared_ray(request: pytest.FixtureRequest) -> SharedRay:
    return share(request.session, "shared_ray", _start_ray)
