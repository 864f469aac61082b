"""What is private can be read by its owner alone, under any umask, also while it is written."""

import os
import stat
from pathlib import Path

import pytest

from fedalloy.core.files import kept_secret, private_folder, write_whole
from fedalloy.experiment.config import Config
from fedalloy.experiment.run import start


def test_what_is_private_is_private_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        settings = {"method": "scaffold", "clients": 3, "rounds": 2, "engine": "inline", "limit": 120}
        start(Config.of(settings), tmp_path / "run")
        kept_secret(tmp_path / "site" / "secrets" / "a")
        write_whole(tmp_path / "public", b"")
    finally:
        os.umask(before)
    kept = [
        tmp_path / "run/checkpoint",
        *(tmp_path / "run/checkpoint").rglob("*"),
        *(tmp_path / "site").rglob("*"),
    ]
    assert len(kept) > 8
    for path in kept:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "public").stat().st_mode) == 0o666


def test_a_private_file_is_private_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: seen.append(stat.S_IMODE(os.fstat(file).st_mode)))
    before = os.umask(0)
    try:
        (tmp_path / f".key.{os.getpid()}").symlink_to(tmp_path / "elsewhere")
        write_whole(tmp_path / "key", b"secret", 0o600)
    finally:
        os.umask(before)
    assert seen == [0o600]
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_an_open_folder_is_closed(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o755)
    private_folder(tmp_path / "state")
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
