"""docs/deploy.md is true: all its commands are run, in order, and its table is that of the program."""

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
from sklearn.datasets import load_digits
from test_deployment import LONG, kill, until

from fedalloy.deploy.deploy import dies_with_us, free_port
from fedalloy.deploy.terms import Terms

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
TABLE = re.compile(r"(?<=<!-- terms -->\n)(.*)(?=<!-- /terms -->)", re.DOTALL)


def commands() -> list[str]:
    typed = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in typed for line in block.replace("\\\n", " ").splitlines()]


def table() -> str:
    rows = ["| term | default | what it is |", "|---|---|---|"]
    for name, field in Terms.model_fields.items():
        default = "" if field.default in (None, "") else f"`{field.default}`"
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        listed = f" One of {', '.join(choices)}." if choices else ""
        rows.append(f"| `{name.replace('_', '-')}` | {default} | {field.description}{listed} |")
    return "\n".join(rows) + "\n"


def test_the_table_is_that_of_the_program() -> None:
    found = TABLE.search(PAGE.read_text())
    assert found
    assert found.group() == table(), "paste what `python tests/deploy/test_page.py` prints"


@LONG
@pytest.mark.xdist_group("deployment")
@pytest.mark.timeout(600)
def test_every_command_of_the_page_runs(tmp_path: Path) -> None:
    digits = load_digits()
    for site in range(2):
        (tmp_path / f"data-{site}").mkdir()
        np.savez(
            tmp_path / f"data-{site}" / "scans.npz", x=digits.images[site::2] / 16, y=digits.target[site::2]
        )
    running, port = [], str(free_port())
    played = 0
    try:
        for number, line in enumerate(commands()):
            words = shlex.split(line.replace("9092", port))
            if words[0] == "fedalloy":
                words = [sys.executable, "-m", *words]
            log = tmp_path / f"{number}.log"
            with log.open("wb") as out:
                process = subprocess.Popen(
                    words,
                    cwd=tmp_path,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=dies_with_us(),
                )
            played += 1
            if words[3:5] == ["deploy", "server"]:
                running.append(process)
                until(lambda file=log: "ready:" in file.read_text(errors="replace"), "the server")  # type: ignore[misc]
            elif words[3:5] == ["deploy", "site"]:
                running.append(process)
            else:
                assert process.wait(200) == 0, f"{line}\n{log.read_text(errors='replace')}"
        assert all(process.poll() is None for process in running)
        assert (tmp_path / "federation" / "server" / "run" / "report.html").exists()
    finally:
        for process in running:
            process.terminate()
        time.sleep(3)
        for process in running:
            if process.poll() is None:
                kill(process)
    assert played == len(commands())


if __name__ == "__main__":
    print(table(), end="")
