"""A run folder that was damaged is refused with a sentence that names the file, or ends with the same bits."""

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedalloy.analysis.diagnose import study
from fedalloy.core.files import kept_secret
from fedalloy.core.wire import dump, restore
from fedalloy.errors import FedAlloyError, FedAlloyWarning
from fedalloy.experiment.config import Config
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import reopen, resume, start
from fedalloy.report.html import write_run_report
from fuzzing import dice
from terminal import fedalloy, tree

METHODS = {
    "scaffold": "scaffold",
    "local": "local",
    "private": "fedavg+private(clip=1, noise=1)",
    "fedpac": "fedpac",
}
ROUNDS, CUT = 5, 3  # the run is cut after round 3; its last checkpoint is of round 2
Bits = tuple[Any, ...]


def config(method: str) -> Config:
    return Config.of(
        {
            "method": METHODS[method],
            "model": "mlp(hidden=4)",
            "clients": 3,
            "skew": "dirichlet:1.0",
            "limit": 120,
            "rounds": ROUNDS,
            "batch": 64,
            "checkpoint_every": 2,
            "engine": "inline",
        }
    )


class Enough(Exception):
    pass


def cut(config: Config, path: Path, after: int = CUT) -> None:
    def stop(record: dict[str, Any]) -> None:
        if record["round"] == after:
            raise Enough

    with pytest.raises(Enough):
        start(config, path, on_round=stop)


def bits(path: Path) -> Bits:
    """What a resumed run ends with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedAlloyWarning)
        result = resume(path)
    told = [{key: value for key, value in line.items() if key != "seconds"} for line in result.history]
    summary = result.summary
    return summary["weights_sha256"], summary["private_sha256"], summary.get("epsilon"), told


def typed(path: Path) -> Bits:
    """The same, as a user does it."""
    said = fedalloy("run", "--resume", str(path), "--json")
    if said.code:
        assert (said.code, len(said.trouble)) == (2, 1), said.err
        raise FedAlloyError(said.trouble[0])
    return bits(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path, Bits]]:
    """By method: a run that was cut, the same run finished, and the bits it ends with."""
    made: dict[str, tuple[Path, Path, Bits]] = {}

    def of(method: str) -> tuple[Path, Path, Bits]:
        if method not in made:
            place = tmp_path_factory.mktemp(method)
            cut(config(method), place / "cut")
            shutil.copytree(place / "cut", place / "whole")
            made[method] = place / "cut", place / "whole", bits(place / "whole")
        return made[method]

    return of


Runs = Callable[[str], tuple[Path, Path, Bits]]


def flip(path: Path, at: int) -> None:
    blob = bytearray(path.read_bytes())
    blob[at] ^= 1
    path.write_bytes(blob)


def edit(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def states(run: Path) -> list[Path]:
    """The private states that belong to the last checkpoint."""
    return sorted(run.glob("checkpoint/clients/*/000002.safetensors"))


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def without_digests(run: Path) -> None:
    state, facts = restore((run / "checkpoint/server.safetensors").read_bytes())
    (run / "checkpoint/server.safetensors").write_bytes(dump(state, {"round": facts["round"]}))


def longer(run: Path) -> None:
    """A run without a checkpoint although it has more rounds on record than it may have."""
    (run / "checkpoint/server.safetensors").unlink()


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_link(path: Path, to: str) -> None:
    path.unlink()
    path.symlink_to(to)


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def as_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


def begun_again(run: Path) -> None:
    shutil.rmtree(run / "checkpoint")
    (run / "history.jsonl").unlink()


def appended(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randint(1, 40)))


REFUSED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a history line deleted": (
        "private",
        lambda run: edit(run / "history.jsonl", lambda lines: lines[1:]),
        "history.jsonl",
    ),
    "history cut before the checkpoint": (
        "private",
        lambda run: edit(run / "history.jsonl", lambda lines: lines[:1]),
        "history.jsonl",
    ),
    "history lines swapped": (
        "private",
        lambda run: edit(run / "history.jsonl", lambda lines: [lines[1], lines[0], *lines[2:]]),
        "history.jsonl",
    ),
    "a number in the history": (
        "private",
        lambda run: edit(
            run / "history.jsonl",
            lambda lines: [lines[0].replace('"sampled": 1.0', '"sampled": 0.1'), *lines[1:]],
        ),
        "history.jsonl",
    ),
    "history deleted": ("private", lambda run: (run / "history.jsonl").unlink(), "history.jsonl"),
    "history a folder": ("private", lambda run: as_folder(run / "history.jsonl"), "history.jsonl"),
    "a line of the config": (
        "scaffold",
        lambda run: edit(
            run / "config.toml",
            lambda lines: ["lr = 0.06\n" if line.startswith("lr =") else line for line in lines],
        ),
        "config.toml",
    ),
    "a line of the config, and its digest deleted": (
        "scaffold",
        lambda run: edit(
            run / "config.toml",
            lambda lines: ["lr = 0.06\n" if line.startswith("lr =") else line for line in lines[1:]],
        ),
        "config.toml",
    ),
    "a byte of the weights": (
        "scaffold",
        lambda run: flip(run / "checkpoint/server.safetensors", -1),
        "server.safetensors",
    ),
    "a byte of the header": (
        "scaffold",
        lambda run: flip(run / "checkpoint/server.safetensors", 3),
        "server.safetensors",
    ),
    "a checkpoint without digests": ("scaffold", without_digests, "server.safetensors"),
    "no checkpoint": ("scaffold", longer, "server.safetensors"),
    "a checkpoint emptied": (
        "scaffold",
        lambda run: (run / "checkpoint/server.safetensors").write_bytes(b""),
        "server.safetensors",
    ),
    "a checkpoint that is a folder": (
        "scaffold",
        lambda run: as_folder(run / "checkpoint/server.safetensors"),
        "server.safetensors",
    ),
    "a byte of a private state": (
        "scaffold",
        lambda run: flip(states(run)[1], -1),
        "000001/000002.safetensors",
    ),
    "a private state deleted": ("scaffold", lambda run: states(run)[1].unlink(), "000001/000002.safetensors"),
    "all private state deleted": (
        "scaffold",
        lambda run: shutil.rmtree(run / "checkpoint/clients"),
        "000000/000002.safetensors",
    ),
    "private states swapped": (
        "local",
        lambda run: swap(states(run)[0], states(run)[1]),
        "000000/000002.safetensors",
    ),
    "a private state replaced by an older one": (
        "local",
        lambda run: states(run)[2].rename(states(run)[2].with_name("000001.safetensors")),
        "000002/000002.safetensors",
    ),
    "clients that are a file": (
        "local",
        lambda run: as_file(run / "checkpoint/clients"),
        "checkpoint/clients",
    ),
    "checkpoint that is a file": (
        "local",
        lambda run: as_file(run / "checkpoint"),
        "checkpoint",
    ),
    "a lock that is a folder": ("local", lambda run: as_folder(run / "checkpoint/.lock"), ".lock"),
    "a lock that is a link": (
        "local",
        lambda run: as_link(run / "checkpoint/.lock", "../config.toml"),
        ".lock",
    ),
    "a history line twice": (
        "private",
        lambda run: edit(run / "history.jsonl", lambda lines: [lines[0], *lines]),
        "history.jsonl",
    ),
    "history of another run": (
        "private",
        lambda run: edit(run / "history.jsonl", lambda lines: [line.replace("1", "2") for line in lines]),
        "history.jsonl",
    ),
    "history a link to nowhere": (
        "private",
        lambda run: as_link(run / "history.jsonl", "nowhere"),
        "history.jsonl",
    ),
    "history a pipe": ("private", lambda run: as_pipe(run / "history.jsonl"), "history.jsonl"),
    "config a pipe": ("scaffold", lambda run: as_pipe(run / "config.toml"), ""),
    "a line of the config deleted": (
        "scaffold",
        lambda run: edit(run / "config.toml", lambda lines: [x for x in lines if not x.startswith("limit")]),
        "config.toml",
    ),
    "a setting added to the config": (
        "scaffold",
        lambda run: edit(run / "config.toml", lambda lines: [*lines, "weight_decay = 0.1\n"]),
        "config.toml",
    ),
    "a checkpoint cut": (
        "private",
        lambda run: os.truncate(run / "checkpoint/server.safetensors", 200),
        "server.safetensors",
    ),
    "a checkpoint with more at its end": (
        "private",
        lambda run: append(run / "checkpoint/server.safetensors"),
        "server.safetensors",
    ),
    "a checkpoint of a client's state": (
        "scaffold",
        lambda run: shutil.copy(states(run)[0], run / "checkpoint/server.safetensors"),
        "server.safetensors",
    ),
    "a checkpoint that is a link": (
        "scaffold",
        lambda run: as_link(run / "checkpoint/server.safetensors", "nowhere"),
        "server.safetensors",
    ),
    "a checkpoint that is a pipe": (
        "scaffold",
        lambda run: as_pipe(run / "checkpoint/server.safetensors"),
        "server.safetensors",
    ),
    "a private state cut": (
        "local",
        lambda run: os.truncate(states(run)[0], 100),
        "000000/000002.safetensors",
    ),
    "a private state that is a pipe": (
        "local",
        lambda run: as_pipe(states(run)[0]),
        "000000/000002.safetensors",
    ),
    "a private state that is a folder": (
        "local",
        lambda run: as_folder(states(run)[0]),
        "000000/000002.safetensors",
    ),
    "state of a client that has none": (
        "scaffold",
        lambda run: shutil.copytree(states(run)[0].parent, run / "checkpoint/clients/000007"),
        "000007/000002.safetensors",
    ),
    "something among the clients": (
        "scaffold",
        lambda run: (run / "checkpoint/clients/notes").mkdir(),
        "checkpoint/clients/notes",
    ),
    "how samples are prepared": (
        "scaffold",
        lambda run: edit(run / "preprocessing.json", lambda lines: [x.replace("0.", "1.") for x in lines]),
        "preprocessing.json",
    ),
    "how samples are prepared, deleted": (
        "scaffold",
        lambda run: (run / "preprocessing.json").unlink(),
        "preprocessing.json",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_damage_is_refused_and_the_file_is_named(name: str, runs: Runs, tmp_path: Path) -> None:
    method, damage, named = REFUSED[name]
    run = tmp_path / "run"
    shutil.copytree(runs(method)[0], run)
    damage(run)
    with pytest.raises(FedAlloyError) as said:
        resume(run)
    assert str(run) in str(said.value)
    assert named in str(said.value)
    assert not (run / "summary.json").exists()


@pytest.mark.parametrize(
    "name", [name for name in REFUSED if name.startswith(("a history", "no ", "a byte"))]
)
def test_the_command_line_says_so_in_one_sentence(name: str, runs: Runs, tmp_path: Path) -> None:
    method, damage, named = REFUSED[name]
    shutil.copytree(runs(method)[0], tmp_path / "run")
    damage(tmp_path / "run")
    before = tree(tmp_path / "run")
    said = fedalloy("run", "--resume", str(tmp_path / "run"))
    assert said.code == 2
    assert len(said.trouble) == 1
    assert named in said.trouble[0]
    assert tree(tmp_path / "run") == before


def test_a_state_of_another_run_is_refused(runs: Runs, tmp_path: Path) -> None:
    """The same client and round of another method."""
    run, other = tmp_path / "run", runs("scaffold")[0]
    shutil.copytree(runs("local")[0], run)
    shutil.copy(states(other)[1], states(run)[1])
    with pytest.raises(FedAlloyError, match=r"000001/000002\.safetensors is damaged"):
        resume(run)


SAME: dict[str, Callable[[Path], object]] = {
    "half a line at the end": lambda run: edit(
        run / "history.jsonl", lambda lines: [*lines, '{"round": 4, "me']
    ),
    "a round after the checkpoint": lambda run: edit(run / "history.jsonl", lambda lines: lines[:2]),
    "another engine": lambda run: edit(
        run / "config.toml", lambda lines: [line.replace('"inline"', '"workers"') for line in lines]
    ),
    "a state after the checkpoint": lambda run: flip(
        run / "checkpoint/clients/000001/000003.safetensors", -1
    ),
    "everything but the config": begun_again,
}


@pytest.mark.parametrize("name", SAME)
def test_what_no_round_depends_on_may_differ(name: str, runs: Runs, tmp_path: Path) -> None:
    before, _, expected = runs("scaffold")
    shutil.copytree(before, tmp_path / "run")
    SAME[name](tmp_path / "run")
    assert bits(tmp_path / "run") == expected


def test_a_config_changed_before_the_first_checkpoint_is_refused(tmp_path: Path) -> None:
    cut(config("scaffold"), tmp_path / "run", after=1)
    edit(tmp_path / "run/config.toml", lambda lines: [line.replace("seed = 0", "seed = 1") for line in lines])
    with pytest.raises(FedAlloyError, match=r"config\.toml is damaged: it holds other settings"):
        resume(tmp_path / "run")


def test_a_folder_of_an_earlier_version_carries_on_with_a_warning(runs: Runs, tmp_path: Path) -> None:
    before, _, expected = runs("scaffold")
    run = tmp_path / "run"
    shutil.copytree(before, run)
    edit(run / "config.toml", lambda lines: lines[1:])
    without_digests(run)
    with pytest.warns(FedAlloyWarning, match="cannot be verified"):
        resume(run)
    assert bits(run) == expected


@pytest.mark.parametrize("name", ["history.jsonl", "config.toml", "summary.json"])
def test_a_finished_run_that_was_changed_is_not_believed(name: str, runs: Runs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs("private")[1], run)
    text = (run / name).read_text()
    changed = {
        "history.jsonl": text.partition("\n")[2],
        "config.toml": text.replace("noise=1", "noise=2"),
        "summary.json": text.replace('"epsilon": ', '"epsilon": 0'),
    }[name]
    if name == "summary.json":
        changed = json.dumps(json.loads(text) | {"epsilon": 0.5})
    assert changed != text
    (run / name).write_text(changed)
    for use in (resume, write_run_report):
        with pytest.raises(FedAlloyError, match=rf"{name} is damaged"):
            use(run)


def test_diagnoses_refuse_damage_too(runs: Runs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs("local")[1], run)
    study(*reopen(run), RunFolder.existing(run))
    flip(sorted(run.glob("checkpoint/clients/000001/*"))[-1], -1)
    with pytest.raises(FedAlloyError, match=r"000001/000005\.safetensors is damaged"):
        reopen(run)


def test_a_lost_summary_is_written_again(runs: Runs, tmp_path: Path) -> None:
    _, whole, expected = runs("private")
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run/summary.json").unlink()
    assert bits(tmp_path / "run") == expected


def test_a_run_has_no_other_secret_than_it_began_with(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", config("local"))
    kept_secret(folder.path / "secret")
    with folder.locked():
        folder.record({"round": 1})
        folder.save(1, {})
        assert folder.restore() == (1, {})
        (folder.path / "secret").unlink()
        kept_secret(folder.path / "secret")
        with pytest.raises(FedAlloyError, match="secret is damaged"):
            folder.restore()
    (folder.path / "secret").write_text("none")
    with pytest.raises(FedAlloyError, match="holds no secret"):
        kept_secret(folder.path / "secret")


# At random


def any_file(run: Path, chance: random.Random) -> Path:
    return chance.choice(sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink()))


def number_changed(path: Path, chance: random.Random) -> None:
    text = path.read_bytes()
    digits = [at for at, byte in enumerate(text) if 48 <= byte <= 57]
    if digits:
        at = chance.choice(digits)
        path.write_bytes(
            text[:at] + str((text[at] - 48 + chance.randint(1, 9)) % 10).encode() + text[at + 1 :]
        )


def lines_changed(path: Path, chance: random.Random) -> None:
    lines = path.read_bytes().split(b"\n")
    at, to = chance.randrange(len(lines)), chance.randrange(len(lines))
    how = chance.choice(["delete", "repeat", "move"])
    line = lines[at] if how == "repeat" else lines.pop(at)
    if how != "delete":
        lines.insert(to, line)
    path.write_bytes(b"\n".join(lines))


def flipped(path: Path, chance: random.Random) -> None:
    blob = bytearray(path.read_bytes())
    if blob:
        blob[chance.randrange(len(blob))] ^= 1 << chance.randrange(8)
        path.write_bytes(blob)


def replaced(path: Path, chance: random.Random) -> None:
    path.unlink()
    how = chance.choice(["folder", "nowhere", "file", "pipe"])
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere" if how == "nowhere" else "config.toml")


def folder_gone(path: Path, chance: random.Random) -> None:
    if path.parent.name == "run":
        path.unlink()
    else:
        shutil.rmtree(path.parent)


def renamed(path: Path, chance: random.Random) -> None:
    """Under the name of another round, client or file."""
    others = [f"{number:06d}.safetensors" for number in range(6)] + ["x", "1.safetensors", ".x.1"]
    path.rename(path.with_name(chance.choice(others)))


HOW: dict[str, Callable[[Path, random.Random], None]] = {
    "flipped": flipped,
    "cut": lambda path, chance: os.truncate(path, chance.randint(0, path.stat().st_size)),
    "deleted": lambda path, chance: path.unlink(),
    "emptied": lambda path, chance: os.truncate(path, 0),
    "appended": appended,
    "number": number_changed,
    "lines": lines_changed,
    "replaced": replaced,
    "folder gone": folder_gone,
    "renamed": renamed,
}


def damage(run: Path, other: Path, chance: random.Random) -> list[str]:
    """One damage, now and then two; what was done."""
    done = []
    for _ in range(chance.choice([1, 1, 1, 2])):
        path = any_file(run, chance)
        name, how = str(path.relative_to(run)), chance.choice([*HOW, "swapped", "older"])
        if how == "swapped":
            swap(path, any_file(run, chance))
        elif how == "older":  # of the run as it was a round before
            if (other / name).is_file():
                shutil.copyfile(other / name, path)
        else:
            HOW[how](path, chance)
        done.append(f"{name} {how}")
    return done


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The same run, cut a checkpoint before."""
    made: dict[str, Path] = {}

    def of(method: str) -> Path:
        if method not in made:
            made[method] = tmp_path_factory.mktemp("earlier") / "cut"
            cut(config(method), made[method], after=1)
        return made[method]

    return of


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
def test_any_damage_is_refused_or_changes_nothing(
    runs: Runs, earlier: Callable[[str], Path], tmp_path: Path
) -> None:
    counts = {"refused": 0, "same": 0}
    for chance in dice(60, 1000):
        method = chance.choice(list(METHODS))
        before, whole, expected = runs(method)
        run = tmp_path / "run"
        shutil.copytree(chance.choice([before, before, whole]), run)
        done = damage(run, earlier(method), chance)
        where = f"{chance} {method}: {done}"
        said, found = None, None
        try:
            found = bits(run) if chance.random() < 0.9 else typed(run)
        except FedAlloyError as error:
            said = str(error)
        except Exception as error:
            raise AssertionError(where) from error
        assert found == expected or (said and str(run) in said), f"{where}: {said or 'other bits'}"
        counts["refused" if said else "same"] += 1
        shutil.rmtree(run)
    print(counts)
    assert min(counts.values()) > 5
