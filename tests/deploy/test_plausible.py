"""What a mistyping operator sees: one sentence, exit code 2, and nothing written."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedalloy.cli.app import main
from fedalloy.deploy.audit import Audit
from fedalloy.deploy.deploy import Deployment

GOOD = {"--clients": "2", "--host": "127.0.0.1", "--data": "scans", "--class-names": "a,b", "--model": "mlp"}


def typed(*words: str) -> int:
    try:
        main(list(words))
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def init(folder: Path, *flags: str, **changes: str) -> int:
    chosen = {**GOOD, **{f"--{name.replace('_', '-')}": value for name, value in changes.items()}}
    return typed("deploy", "init", str(folder), *flags, *(word for pair in chosen.items() for word in pair))


@pytest.mark.parametrize(
    ("changes", "flags", "why"),
    [
        *[({"host": host}, (), "is no name or address") for host in
          ("", "a b", "a,,b", "https://a.org", "a.org:9092", "a..b", "10.0.0.300", "x" * 300)],
        *[({"port": port}, (), "they run from 1 to 65535") for port in ("0", "70000")],
        ({"class_names": "a"}, (), "one class alone"),
        ({"class_names": "a,b,a"}, (), "'a' twice"),
        ({"class_names": "a,,b"}, (), "an empty name"),
        ({"method": "fedprx"}, (), "did you mean 'fedprox'?"),
        ({"run_folder": "/tmp/x"}, (), "outside of server/"),
        ({"run_folder": "../x"}, (), "outside of server/"),
        ({"method": "feddw"}, ("--masked",), "cannot be masked"),
    ],
)  # fmt: skip
def test_a_bad_plan_leaves_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    flags: tuple[str, ...],
    why: str,
) -> None:
    assert init(tmp_path / "parent" / "made", *flags, **changes) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert why in told
    assert "Traceback" not in told
    assert not (tmp_path / "parent").exists()


@pytest.fixture
def made(tmp_path: Path) -> Path:
    assert init(tmp_path / "made") == 0
    return tmp_path / "made"


def test_a_mistyped_setting_is_noticed_before_anything_starts(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Deployment, "start_run", lambda *_: pytest.fail("it was started"))
    assert typed("deploy", "run", str(made), "--run-config", "ruonds=2") == 2
    assert "did you mean 'rounds'?" in capsys.readouterr().err
    assert typed("deploy", "run", str(made), "--run-config", 'run-folder="../../x"') == 2
    assert "outside of server/" in " ".join(capsys.readouterr().err.split())


def test_status_names_the_run_that_was_started(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the folder that stands in the app's own settings."""
    monkeypatch.setattr(Deployment, "start_run", lambda *_: 42)
    monkeypatch.setattr(Deployment, "status", lambda *_: ("running", ""))
    second = made / "server" / "second"
    second.mkdir(parents=True)
    line: dict[str, Any] = {"round": 1, "metrics": {"personal_local_acc": 0.75}, "refused": []}
    (second / "history.jsonl").write_text(json.dumps(line) + "\n")
    assert typed("deploy", "run", str(made), "--run-config", 'run-folder="second" rounds=7', "--detach") == 0
    capsys.readouterr()
    assert typed("deploy", "status", str(made), "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["run"], facts["rounds"], facts["of"]) == ("42", 1, 7)
    assert Path(facts["folder"]).name == "second"
    assert typed("deploy", "status", str(made)) == 0
    assert "accuracy 75.00% (tested at the sites, on their own data)" in capsys.readouterr().out


def test_the_audit_log_is_printed_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("deploy", "audit", str(tmp_path)) == 2
    assert "nothing has left this site yet" in " ".join(capsys.readouterr().err.split())
    log = Audit(tmp_path / "state")
    entry = {"time": "2030-01-01T00:00:00.000+00:00", "to": "a:1", "run": None, "round": 3, "kind": "train"}
    log.append({**entry, "slots": {"share.weights": 1234}, "bytes": 1234, "epsilon": 2.5})
    assert typed("deploy", "audit", str(tmp_path)) == 0
    told = capsys.readouterr().out
    assert "train  round 3  1,234 bytes (share.weights 1,234)  epsilon 2.50  to a:1" in told
    assert typed("deploy", "audit", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["entries"][0]["bytes"] == 1234
    log.path.write_bytes(log.path.read_bytes().replace(b"1234", b"1235"))
    assert typed("deploy", "audit", str(tmp_path), "--verify") == 2
    assert "not as it was written" in " ".join(capsys.readouterr().err.split())


WITHOUT = """
import sys
for name in ("flwr", "cryptography", "httpx", "uvicorn"):
    sys.modules[name] = None  # as if it were not installed
from fedalloy.cli.app import main
for words in sys.argv[1:]:
    try:
        main(words.split())
    except SystemExit as end:
        print(end.code, words, file=sys.stderr)
"""


def test_without_the_extra_every_command_says_what_to_type(made: Path, tmp_path: Path) -> None:
    plan = "--clients 2 --data scans --class-names a,b --model mlp"
    site = made / "sites" / "site-0"
    commands = [
        *(f"deploy init {tmp_path / 'new'} {plan}", f"deploy server {made}", f"deploy run {made}"),
        *(f"deploy site {site} --check", f"deploy key {made} site-0 --new", f"deploy renew {made}"),
    ]
    words = [sys.executable, "-c", WITHOUT, *commands]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    said = " ".join(done.stderr.split())
    assert "Traceback" not in said
    for command in commands:
        assert f"type: pip install 'fedalloy[flower]' 2 {command}" in said
    assert not (tmp_path / "new").exists()
