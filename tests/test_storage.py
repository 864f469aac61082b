"""Files that are always whole, the vault of private state, full disks, and one writer per run."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disk import disk_with
from fedalloy.core.files import append_line, write_whole
from fedalloy.core.wire import fingerprint
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import Result, resume, start
from fedalloy.round.vault import Vault
from fuzzing import examples
from terminal import save_npz, tree

CONFIG = Config.of(
    {
        "method": "scaffold",
        "model": "mlp(hidden=8)",
        "clients": 5,
        "skew": "dirichlet:0.5",
        "participation": 0.6,
        "rounds": 4,
        "batch": 64,
        "engine": "inline",
    }
)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# Whole files


def test_write_whole_writes_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize(("owner", "stage"), [(os, "fsync"), (Path, "replace")])
@pytest.mark.parametrize("failure", [OSError(errno.EIO, "broken"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, stage: str, failure: BaseException
) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(owner, stage, fail)
    with pytest.raises(type(failure)):
        write_whole(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_a_full_disk_leaves_the_old_file_and_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    with disk_with(1000), pytest.raises(FedAlloyError, match=r"no room left to write .*--resume"):
        write_whole(path, bytes(5000))
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_another_trouble_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "nowhere" / "file", b"")


def test_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, "one")
    append_line(path, "two")
    assert path.read_text() == "one\ntwo\n"


@pytest.mark.parametrize("first", [True, False])
def test_a_line_without_room_leaves_the_file_as_it_was(tmp_path: Path, first: bool) -> None:
    path = tmp_path / "lines"
    if not first:
        append_line(path, "one")
    with disk_with(100), pytest.raises(FedAlloyError, match="no room left"):
        append_line(path, "x" * 1000)
    assert (path.read_text() if path.exists() else "") == ("" if first else "one\n")


def test_fingerprints_tell_names_shapes_types_and_bits_apart() -> None:
    items = [
        {"a": torch.zeros(2)},
        {"b": torch.zeros(2)},
        {"a": torch.zeros(1, 2)},
        {"a": torch.zeros(2, dtype=torch.int32)},
        {"a": torch.tensor([0.0, -0.0])},
    ]
    assert len({fingerprint(item) for item in items}) == len(items)
    assert fingerprint({"a": torch.zeros(2)}) == fingerprint(items[0])


# The vault


def state(number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([float(number)])}


def holds(vault: Vault, client: int, before: int) -> float | None:
    found = vault.load(client, before)
    return float(found["x"]) if found else None


def test_a_round_reads_what_was_there_before_it(tmp_path: Path) -> None:
    vault = Vault(tmp_path / "clients")
    assert vault.load(3, before=10) == {}
    vault.save(3, 2, state(2))
    vault.save(3, 5, state(5))
    assert [holds(vault, 3, before) for before in (2, 3, 5, 6, 99)] == [None, 2, 2, 5, 5]
    vault.save(3, 5, state(55))  # the round is run again
    assert holds(vault, 3, 6) == 55


def test_clients_without_state_leave_no_file(tmp_path: Path) -> None:
    vault = Vault(tmp_path / "clients")
    vault.save(0, 1, {})
    assert names(tmp_path) == []
    assert vault.fingerprint() is None


def test_trim_keeps_what_a_resume_can_ask_for(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    for version in (1, 2, 4, 6):
        vault.save(0, version, state(version))
        vault.save(1, version, state(version))
    vault.trim([0], checkpoint=5)
    assert [holds(vault, 0, before) for before in (4, 5, 6, 7)] == [None, 4, 4, 6]
    assert holds(vault, 1, 2) == 1  # nobody asked to trim this one


def test_rewind_forgets_later_rounds_and_leftovers(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    for version in (1, 3, 5):
        vault.save(0, version, state(version))
    (tmp_path / "000000" / ".000005.safetensors.4711").write_bytes(b"half")
    vault.rewind(3)
    assert names(tmp_path) == ["000000", "000000/000001.safetensors", "000000/000003.safetensors"]
    Vault(tmp_path / "nowhere").rewind(3)


rounds = st.integers(1, 12)


@examples(50)
@given(played=st.sets(rounds), every=st.integers(1, 4), killed=rounds)
def test_any_resume_finds_its_state(
    tmp_path_factory: pytest.TempPathFactory, played: set[int], every: int, killed: int
) -> None:
    """Play to a round, be killed, rewind to the checkpoint: what is read next is what was read the first time."""
    vault = Vault(tmp_path_factory.mktemp("vault"))
    since: set[int] = set()
    for number in range(1, killed + 1):
        if number in played:
            vault.save(0, number, state(number))
            since.add(0)
        if number % every == 0:
            vault.trim(since, number)
            since.clear()
    checkpoint = killed - killed % every
    vault.rewind(checkpoint)
    for number in range(checkpoint + 1, 14):
        expected = max((r for r in played if r <= checkpoint), default=None)
        assert holds(vault, 0, number) == expected


def test_the_fingerprint_is_of_the_newest_states(tmp_path: Path) -> None:
    long, short = Vault(tmp_path / "long"), Vault(tmp_path / "short")
    for version in (1, 2, 3):
        long.save(7, version, state(version))
    short.save(7, 3, state(3))
    assert long.fingerprint() == short.fingerprint()
    short.save(8, 1, state(3))
    assert long.fingerprint() != short.fingerprint()


# The run folder


def test_a_folder_with_anything_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(FedAlloyError, match="exists already; carry on with '--resume"):
        RunFolder.create(tmp_path, CONFIG)
    (tmp_path / "file").touch()
    with pytest.raises(FedAlloyError, match="exists already"):
        RunFolder.create(tmp_path / "file", CONFIG)
    with pytest.raises(FedAlloyError, match="is not a run folder"):
        RunFolder.existing(tmp_path)


def test_a_creation_that_was_killed_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / ".config.toml.4711").write_bytes(b"half")
    RunFolder.create(tmp_path, CONFIG)
    assert RunFolder.existing(tmp_path).config == CONFIG


def test_half_a_line_is_no_history(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", CONFIG)
    folder.record({"round": 1})
    with (folder.path / "history.jsonl").open("ab") as file:
        file.write(b'{"round": 2, "met')
    assert folder.history() == [{"round": 1}]


def test_restore_cuts_back_to_the_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", CONFIG)
    with folder.locked():
        assert folder.restore() == (0, {})
        for number in (1, 2, 3):
            folder.record({"round": number})
            folder.vault.save(0, number, state(number))
            if number == 2:
                folder.save(number, state(number))
        (folder.path / "checkpoint" / ".server.safetensors.4711").write_bytes(b"half")
        number, found = folder.restore()
    assert (number, float(found["x"])) == (2, 2)
    assert folder.history() == [{"round": 1}, {"round": 2}]
    assert holds(folder.vault, 0, 99) == 2
    assert not list(folder.path.rglob(".*.4711"))


def halfway(config: Config, path: Path) -> None:
    """A run cut after its second round."""

    class Enough(Exception):
        pass

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise Enough

    with pytest.raises(Enough):
        start(config, path, on_round=stop)


@pytest.mark.parametrize("changed", ["x_train", "y_train", "x_test"])
def test_a_run_carries_on_where_its_data_went_but_not_on_others(tmp_path: Path, changed: str) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (60, 6, 6), np.uint8),
        "y_train": np.arange(60) % 3,
        "x_test": rng.integers(0, 256, (9, 6, 6), np.uint8),
        "y_test": np.arange(9) % 3,
    }
    for place in ("here", "moved"):
        save_npz(tmp_path / place / "mine.npz", arrays)
    save_npz(tmp_path / "other" / "mine.npz", {**arrays, changed: arrays[changed][::-1]})
    configs = {
        place: CONFIG.model_copy(update={"data": "mine", "data_root": str(tmp_path / place)})
        for place in ("here", "moved", "other")
    }
    halfway(configs["here"], tmp_path / "run")
    before = tree(tmp_path / "run")
    with pytest.raises(
        FedAlloyError, match="was started on other data; give the --data-root where those are"
    ):
        resume(tmp_path / "run", configs["other"])
    assert {name for name, now in tree(tmp_path / "run").items() if before.get(name) != now} <= {
        "checkpoint/.lock"
    }
    found, whole = resume(tmp_path / "run", configs["moved"]), start(configs["here"], tmp_path / "whole")
    assert hashes(found) == hashes(whole)
    assert found.summary["data_sha256"] == whole.summary["data_sha256"]


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", CONFIG)
    with folder.locked():
        with (
            pytest.raises(FedAlloyError, match="another process is writing"),
            RunFolder(folder.path).locked(),
        ):
            pass
        code = (
            "import sys, pathlib, fedalloy\n"
            "try: fedalloy.resume(pathlib.Path(sys.argv[1]))\n"
            "except fedalloy.FedAlloyError as error: print(error)"
        )
        said = subprocess.run(
            [sys.executable, "-c", code, str(folder.path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert "another process is writing" in said.stdout
    with RunFolder(folder.path).locked():
        pass


def test_the_lock_goes_with_the_process(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", CONFIG)
    child = os.fork()
    if child == 0:
        with folder.locked():
            os._exit(0)
    os.waitpid(child, 0)
    with folder.locked():
        pass


# A run on a full disk


def hashes(result: Result) -> tuple[str, str | None]:
    return result.summary["weights_sha256"], result.summary["private_sha256"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return start(CONFIG, tmp_path_factory.mktemp("whole") / "run")


def size_of(result: Result, name: str) -> int:
    return (result.folder / name).stat().st_size


@pytest.mark.parametrize("room", ["nothing", "half the history", "half the checkpoint"])
def test_a_run_on_a_full_disk_can_be_resumed(tmp_path: Path, whole: Result, room: str) -> None:
    history, server = size_of(whole, "history.jsonl"), size_of(whole, "checkpoint/server.safetensors")
    config = size_of(whole, "config.toml")
    assert config < history // 2 < server // 2
    size = {"nothing": config, "half the history": history // 2, "half the checkpoint": server // 2}[room]
    with disk_with(size), pytest.raises(FedAlloyError, match="no room left to write"):
        start(CONFIG, tmp_path / "run")
    assert not list((tmp_path / "run").rglob(".*.[0-9]*"))
    assert hashes(resume(tmp_path / "run")) == hashes(whole)


def test_a_disk_that_fills_up_late_costs_no_finished_round(tmp_path: Path, whole: Result) -> None:
    """History lines grow the file until it hits the limit; what came before stays."""
    limit = size_of(whole, "checkpoint/server.safetensors") + 100
    config = CONFIG.model_copy(update={"rounds": 60})
    with disk_with(limit), pytest.raises(FedAlloyError, match=r"history\.jsonl"):
        start(config, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    played = folder.history()
    assert len(played) > 3
    carried: list[int] = []

    class Enough(Exception):
        pass

    def stop(record: dict[str, Any]) -> None:
        carried.append(record["round"])
        raise Enough

    with pytest.raises(Enough):
        resume(folder.path, on_round=stop)
    assert carried == [len(played) + 1]


def test_a_full_disk_in_a_worker_is_a_sentence_too(tmp_path: Path) -> None:
    """The private state of MOON grows with each participation, beyond the limit and beyond the mail."""
    values = {"method": "moon(proj_dim=8, buffer_size=5)", "engine": "workers", "workers": 1, "rounds": 6}
    config = CONFIG.model_copy(update=values)
    with disk_with(8_000), pytest.raises(FedAlloyError, match=r"no room left to write .*clients"):
        start(config, tmp_path / "run")
    assert hashes(resume(tmp_path / "run")) == hashes(start(config, tmp_path / "again"))


def test_the_command_line_says_it_in_one_sentence(tmp_path: Path, whole: Result) -> None:
    limit = size_of(whole, "checkpoint/server.safetensors") // 2

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    config = tmp_path / "config.toml"
    config.write_text(CONFIG.toml())
    fedalloy = [str(Path(sys.executable).with_name("fedalloy"))]
    command = [*fedalloy, "run", "--config", str(config), "--out", str(tmp_path / "run"), "--json"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=240, preexec_fn=full, check=False)
    assert said.returncode == 2
    assert "no room left to write" in said.stderr
    assert "Traceback" not in said.stderr
    again = [*fedalloy, "run", "--resume", str(tmp_path / "run"), "--json"]
    said = subprocess.run(again, capture_output=True, text=True, timeout=240, check=True)
    assert json.loads(said.stdout)["weights_sha256"] == hashes(whole)[0]
