import os
import stat

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.processes.private_folder import keep_others_out, private_folder


def test_none_but_its_user_may_enter_it_however_it_was_left(tmp_path):
    folder = private_folder(tmp_path / "mine")
    folder.chmod(0o777)
    (folder / "kept").touch()
    assert private_folder(tmp_path / "mine") == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and (folder / "kept").exists()


def test_a_link_that_somebody_made_first_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"mine': is not a folder that belongs to this user; remove it"):
        private_folder(tmp_path / "mine")


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: (tmp_path / "mine").stat().st_uid + 1)
    with pytest.raises(ConfigError, match="is not a folder that belongs to this user"):
        private_folder(tmp_path / "mine")


def test_a_folder_where_anybody_may_rename_what_lies_there_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="has no sticky bit; set TMPDIR to a folder that only you can access"):
        private_folder(tmp_path / "mine")
    tmp_path.chmod(0o1777)
    assert private_folder(tmp_path / "mine").is_dir()


@pytest.mark.parametrize(("before", "after"), [(0o755, 0o700), (0o2775, 0o2770), (0o500, 0o500)])
def test_others_lose_their_rights_and_a_group_that_shares_the_folder_keeps_its(tmp_path, before, after):
    tmp_path.chmod(before)
    keep_others_out(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == after
