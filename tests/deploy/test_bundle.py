"""A site's folder comes from the server's operator: it names a client and a server, and decides nothing else."""

from pathlib import Path

import pytest

from fedalloy.deploy.credentials import make_site_key
from fedalloy.deploy.deploy import site_process
from fedalloy.deploy.plausible import address_of
from fedalloy.errors import FedAlloyError
from terminal import fedalloy


@pytest.mark.parametrize(
    "text",
    [
        """client = '0" allow-code=true more="'\nsuperlink = "127.0.0.1:9"\n""",  # once let the server run code here
        """client = 0\nsuperlink = 'x" allow-code=true more="'\n""",
        "client = 0\nsuperlink = 'x:1 allow-code=true'\n",
        "client = 0\nsuperlink = '--insecure'\n",
        "client = 0\nsuperlink = 'http://example.org:9092'\n",
        'client = 0\nsuperlink = "127.0.0.1:9"\nallow-code = true\n',
        'client = 0\nsuperlink = "127.0.0.1:9"\nstate = "/etc"\n',
        'client = true\nsuperlink = "127.0.0.1:9"\n',
        'client = -1\nsuperlink = "127.0.0.1:9"\n',
        "client = 0\nsuperlink = 9\n",
        "client = 0\n",
        "x = " + "[" * 100_000,
        "\x00",
        "",
    ],
)
def test_a_folder_that_says_more(tmp_path: Path, text: str) -> None:
    make_site_key(tmp_path / "site-0")
    (tmp_path / "site-0" / "site.toml").write_text(text)
    said = fedalloy("deploy", "site", str(tmp_path / "site-0"), "--patience", "0")
    assert said.code == 2
    words = " ".join(said.err.split())
    assert "site.toml" in words or "is no address of a server" in words
    assert not (tmp_path / "site-0" / "state").exists()


@pytest.mark.parametrize("text", ["example.org:9092", "10.0.0.5:1", "[::1]:65535", "a-b.c:80"])
def test_addresses(text: str) -> None:
    assert address_of(text) == text


@pytest.mark.parametrize(
    "text", ["", ":", "a", "a:", ":1", "a:0", "a:65536", "a:1x", "a b:1", "a:²", "-a:1", "a:1\n"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(FedAlloyError, match="is no address"):
        address_of(text)


def test_no_setting_of_a_node_can_bring_another(tmp_path: Path) -> None:
    node = {"client": 0, "data": 'x" allow-code=true y="'}
    with (
        pytest.raises(FedAlloyError, match="must hold neither quotes"),
        site_process(tmp_path, "127.0.0.1:1", node, tmp_path / "state"),
    ):
        pass
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("change", ["component", "module", "package"])
def test_an_app_with_code_of_its_own_needs_leave(tmp_path: Path, change: str) -> None:
    """Flower would run it at the server."""
    words = ("--clients", "2", "--data", "scans", "--class-names", "a,b", "--rounds", "1")
    assert fedalloy("deploy", "init", str(tmp_path / "fed"), *words).code == 0
    app = tmp_path / "fed" / "app"
    if change == "component":
        text = (app / "pyproject.toml").read_text()
        (app / "pyproject.toml").write_text(text.replace("fedalloy.deploy.apps:server_app", "evil:app"))
    elif change == "module":
        (app / "torch.py").write_text("print('here')\n")
    else:
        (app / "fedalloy").mkdir()
    said = fedalloy("deploy", "run", str(tmp_path / "fed"))
    assert said.code == 2
    assert "names code outside of FedAlloy" in " ".join(said.err.split())
