"""A form names a profile: a shipped one, a file of the project, or a kept one; never another file of the machine."""

from pathlib import Path

import pytest

from pipelines.execution.named_profiles import keep_profile, named_profile
from pipelines.flows.profile import load_profile, profile_digest, profile_names, profile_table
from rlhf_core.errors import ConfigError
from tests.support.small_pipeline import write_mini


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder of profiles with links out of it; what is outside is a valid profile, too."""
    project = tmp_path / "project"
    (project / "team").mkdir(parents=True)
    for folder in (tmp_path, project, project / "team"):
        write_mini(folder)
    (project / "out.toml").symlink_to(tmp_path / "mini.toml")
    (project / "up").symlink_to(tmp_path)
    monkeypatch.chdir(project)
    return project


@pytest.mark.parametrize(
    "named", ["tiny/full", "mini.toml", "mini", "team/mini.toml", "team/../mini.toml", "{project}/mini.toml"]
)
def test_a_shipped_profile_and_a_file_of_the_project_are_found(named, project, home):
    profile = named.format(project=project)
    assert named_profile(profile, ["seed=5"], home) == load_profile(profile, ["seed=5"])


@pytest.mark.parametrize(
    "named", ["../mini.toml", "{project}/../mini.toml", "out.toml", "out", "up/mini.toml", "up/mini", "a\0b"]
)
def test_a_file_outside_the_project_is_refused_even_through_a_link(named, project, home):
    profile = named.format(project=project)
    with pytest.raises(ConfigError, match=r"profile = .*: must be a shipped profile, a file below .*project, or"):
        named_profile(profile, [], home)


CHANGES = (["seed=5"], ["ppo.loss.type=gspo"], ["ppo=none", "publish=none"])


@pytest.mark.parametrize(
    ("profile", "overrides"), [*((name, []) for name in profile_names()), *(("tiny/full", one) for one in CHANGES)]
)
def test_a_kept_profile_is_the_same_with_and_without_overrides(profile, overrides, home):
    digest = profile_digest(load_profile(profile))
    keep_profile(profile_table(profile), digest, home)
    assert named_profile(digest[:12], overrides, home) == (wanted := load_profile(profile, overrides))
    assert profile_digest(named_profile(digest, overrides, home)) == profile_digest(wanted)


def test_an_edit_of_the_file_leaves_the_kept_profile_and_an_unknown_digest_is_refused(project, home):
    digest = profile_digest(load_profile("mini.toml"))
    keep_profile(profile_table("mini.toml"), digest, home)
    path = project / "mini.toml"
    path.write_text(path.read_text().replace("steps = 1", "steps = 2"))
    assert load_profile("mini.toml").ppo.steps == 2 and named_profile(digest, [], home).ppo.steps == 1  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="did you mean seed"):
        named_profile(digest, ["sed=5"], home)
    with pytest.raises(ConfigError, match=r"profile = '0123456789ab': .* keeps no such profile; keep it with"):
        named_profile("0123456789ab", [], home)
