"""Keys and certificates as an operator handles them, mistyped, damaged or old, with no server running."""

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from fedalloy.deploy import deploy as processes
from fedalloy.deploy import owner
from fedalloy.deploy.credentials import make_site_key, renew_certificate
from fedalloy.deploy.deploy import Deployment, free_port
from fedalloy.deploy.gate import Roster as Gatekeeper
from fedalloy.deploy.roster import ROSTER_FILE, Roster, keys_in, read_key
from fedalloy.deploy.terms import Terms
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config
from terminal import Said, fedalloy


@pytest.fixture
def made(tmp_path: Path) -> Deployment:
    return Deployment.create(
        tmp_path / "made", Config(clients=2), Terms(sites="dealt"), ["127.0.0.1"], free_port()
    )


def key(made: Deployment, *words: str) -> Said:
    return fedalloy("deploy", "key", str(made.folder), *words)


def refused(said: Said, why: str) -> None:
    """One sentence, exit code 2."""
    assert (said.code, said.out) == (2, "")
    assert why in " ".join(said.err.split()), said.err
    assert "Traceback" not in said.err


def test_a_new_key(made: Deployment) -> None:
    place = made.folder / "sites" / "site-0"
    before = read_key(place / "key.pub"), (place / "key").read_bytes()
    assert key(made, "site-0", "--new", "--json").json == {"site": "site-0", "key": "replaced"}
    after = read_key(place / "key.pub"), (place / "key").read_bytes()
    assert before[0] != after[0]
    assert before[1] != after[1]
    assert stat.S_IMODE((place / "key").stat().st_mode) == 0o600


def test_a_key_that_the_site_made(made: Deployment, tmp_path: Path) -> None:
    make_site_key(tmp_path / "own")
    assert "key replaced" in key(made, "site-1", "--pub", str(tmp_path / "own" / "key.pub")).out
    assert read_key(made.folder / "sites" / "site-1" / "key.pub") == read_key(tmp_path / "own" / "key.pub")


def test_a_site_is_let_out(made: Deployment) -> None:
    assert "key removed" in key(made, "site-1", "--remove").out
    assert keys_in(made.folder / "sites").keys() == {"site-0"}
    refused(key(made, "site-1", "--remove"), "site-1 has no key.pub: it is out already")


@pytest.mark.parametrize("name", ["site-2", "site-x", "../site-0", "site-0/../site-1", "", "credentials"])
def test_no_such_site(made: Deployment, name: str) -> None:
    refused(key(made, name, "--new"), "is no folder in")


@pytest.mark.parametrize("words", [(), ("--new", "--remove")])
def test_one_thing_at_a_time(made: Deployment, words: tuple[str, ...]) -> None:
    refused(key(made, "site-0", *words), "give one of --new, --pub FILE and --remove")


@pytest.mark.parametrize("what", ["nothing", "private", "text", "ed25519", "folder"])
def test_what_is_no_key(made: Deployment, tmp_path: Path, what: str) -> None:
    file = tmp_path / "key.pub"
    if what == "private":
        file.write_bytes((made.folder / "sites" / "site-0" / "key").read_bytes())
    elif what == "text":
        file.write_text("ecdsa-sha2-nistp384 AAAA me@here")
    elif what == "ed25519":  # Flower takes none of these
        ssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        file.write_bytes(ed25519.Ed25519PrivateKey.generate().public_key().public_bytes(*ssh))
    elif what == "folder":
        file.mkdir()
    before = (made.folder / "sites" / "site-0" / "key.pub").read_bytes()
    refused(key(made, "site-0", "--pub", str(file)), "holds no public key; make a pair with: ssh-keygen")
    assert (made.folder / "sites" / "site-0" / "key.pub").read_bytes() == before


def test_the_key_of_another(made: Deployment) -> None:
    file = made.folder / "sites" / "site-1" / "key.pub"
    refused(key(made, "site-0", "--pub", str(file)), "this is the key of site-1")


def test_a_removed_key_does_not_come_back(made: Deployment, tmp_path: Path) -> None:
    """Neither by the command, nor by a file that is put there."""
    (made.folder / "server").mkdir()
    numbers = iter(range(7, 99))

    def follow() -> list[str]:
        return made.roster.follow(
            keys_in(made.folder / "sites"), lambda name, file: next(numbers), lambda node: None
        )

    follow()
    file = made.folder / "sites" / "site-0" / "key.pub"
    old = tmp_path / "old.pub"
    old.write_bytes(file.read_bytes())
    assert key(made, "site-0", "--remove").code == 0
    follow()
    refused(key(made, "site-0", "--pub", str(old)), "was let out before and cannot come back")
    file.write_bytes(old.read_bytes())
    with pytest.raises(FedAlloyError, match=r"site-0: key \w+ was let out before and cannot come back"):
        follow()
    assert made.roster.entries.keys() == {"site-1"}


def test_one_bad_key_holds_nothing_up(made: Deployment, tmp_path: Path) -> None:
    """A site is let out at once, though another's key is damaged, is not its own, or is refused by Flower."""
    sites, roster = made.folder / "sites", Roster(tmp_path / "roster.json")
    for name in ("site-2", "site-3", "site-4"):
        make_site_key(sites / name)

    def register(name: str, file: Path) -> int:
        if name == "site-4":
            raise FedAlloyError("flwr supernode register failed: Public key already in use")
        return int(name[-1]) + 10

    def follow() -> list[str]:
        return roster.follow(keys_in(sites), register, lambda node: None)

    with pytest.raises(FedAlloyError, match="site-4: its key could not be let in, try a new one"):
        follow()
    assert follow() == []  # it is not tried again every second
    (sites / "site-0" / "key.pub").unlink()
    (sites / "site-1" / "key.pub").write_text("damaged")
    (sites / "site-3" / "key.pub").write_bytes((sites / "site-2" / "key.pub").read_bytes())
    with pytest.raises(
        FedAlloyError, match=r"site-0: key \w+ is out.*site-1: .*no public key.*site-3: this is the"
    ):
        follow()
    assert roster.clients == {12: 2}


def test_a_new_certificate(made: Deployment) -> None:
    place = made.folder / "credentials"
    before = (place / "server.pem").read_bytes()
    assert fedalloy("deploy", "renew", str(made.folder), "--json").json["renewed"] == "certificate"
    assert (place / "server.pem").read_bytes() != before
    assert chain(place) == [True]


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("no ca.key", "only it can sign: put it back, or type: fedalloy deploy renew DIR --authority"),
        ("bad ca.key", "holds no certificates of 'fedalloy deploy init'"),
        ("no server.pem", "holds no certificates of 'fedalloy deploy init'"),
        ("bad server.pem", "holds no certificates of 'fedalloy deploy init'"),
    ],
)
def test_nothing_to_renew_with(made: Deployment, what: str, why: str) -> None:
    kind, _, name = what.partition(" ")
    file = made.folder / "credentials" / name
    file.write_text("x") if kind == "bad" else file.unlink()
    refused(fedalloy("deploy", "renew", str(made.folder)), why)


def test_another_authority(made: Deployment) -> None:
    """Old and new are trusted until all sites have both; only then the server shows a certificate of the new one."""
    place, site = made.folder / "credentials", made.folder / "sites" / "site-0"
    assert "when all have it, type: fedalloy deploy renew" in fedalloy(
        "deploy", "renew", str(made.folder), "--authority"
    ).out.replace("\n", " ")
    assert (site / "ca.pem").read_bytes() == (place / "ca.pem").read_bytes()
    assert chain(place) == [True, False]
    renew_certificate(place)
    assert chain(place) == [False, True]
    assert fedalloy("deploy", "renew", str(made.folder), "--authority").code == 0
    assert chain(place) == [True, False]  # the oldest of three is gone


def chain(place: Path) -> list[bool]:
    """Which of the authorities in ca.pem signed the server's certificate."""
    server = x509.load_pem_x509_certificate((place / "server.pem").read_bytes())
    found = []
    for one in x509.load_pem_x509_certificates((place / "ca.pem").read_bytes()):
        try:
            server.verify_directly_issued_by(one)
            found.append(True)
        except Exception:
            found.append(False)
    return found


# What a server refuses to start with


def serve(made: Deployment) -> Said:
    return fedalloy("deploy", "server", str(made.folder), "--bind", "127.0.0.1")


def test_a_taken_port_is_named(made: Deployment) -> None:
    host, _, port = made.address.rpartition(":")
    with socket.create_server((host, int(port))):
        refused(
            serve(made), f"cannot listen on 127.0.0.1:{port}: Address already in use; is a server running"
        )


def test_two_deployments_with_one_port(made: Deployment) -> None:
    """The second is told at once, even if the first has not begun to answer."""
    port = int(made.address.rpartition(":")[2])
    with processes._listener("127.0.0.1", port):
        refused(serve(made), f"cannot listen on 127.0.0.1:{port}")


def test_a_deployment_from_before_there_was_a_roster(made: Deployment) -> None:
    """First the address is missing, then the roster: each time it says what to type."""
    address = made.address
    file = made.folder / "credentials" / "server.toml"
    file.unlink()
    refused(serve(made), f"type: echo 'address = \"{address}\"' > {file}")
    file.write_text(f'address = "{address}"\n')
    (made.folder / "server").mkdir()
    database = made.folder / "server" / "superlink.db"
    database.touch()
    refused(serve(made), f"type: rm {database}*; then start the server again")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"site-0": 1}', '{"site-0": {}}', '{"x": {"pem": "y"}}', "7"]
)
def test_a_damaged_roster(made: Deployment, text: str) -> None:
    """Nobody is let in by it, and the operator reads what to type."""
    here = made.folder / "server"
    here.mkdir()
    (here / "superlink.db").touch()
    file = here / ROSTER_FILE
    file.write_text(text)
    refused(serve(made), f"{file} is damaged, and nobody is let in by it; stop the server, type: rm {file}")
    assert read_key(made.folder / "sites" / "site-0" / "key.pub").encode() not in Gatekeeper(file)
    (here / "superlink.db").unlink()  # with what it belonged to gone, it begins anew
    made._check_memory(here / "superlink.db")
    assert not file.exists()


def test_flowers_own_variables_open_no_port(monkeypatch: pytest.MonkeyPatch, made: Deployment) -> None:
    for name in ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API", "FLWR_DATABASE"):
        monkeypatch.setenv(name, "1")
        assert name not in made.environment
    monkeypatch.setenv("FLWR_HOME", "/elsewhere")
    assert made.environment["FLWR_HOME"] == str(made.folder / ".flwr")


# Who holds a connection to the door for this machine


@pytest.mark.skipif(not owner.TABLE.exists(), reason="only Linux tells who holds a connection")
def test_another_address_of_this_machine_is_another_connection() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as mine,
        socket.socket() as other,
    ):
        near, far = mine.getsockname(), server.getsockname()
        assert owner.holder(near, far) == os.getuid()
        assert owner.holder(("127.0.0.2", near[1]), far) is None  # the port of mine is not enough
        other.bind(("127.0.0.2", near[1]))
        other.connect(far)
        assert owner.holder(("127.0.0.2", near[1]), far) == os.getuid()


def test_the_first_with_that_port_is_not_taken_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """User 1000 may use the port of a connection of user 0 on another address: it stays user 1000."""
    rows = ["sl local rem st tx tr when user timeout inode"]
    rows += [
        "0: 0100007F:9999 0100007F:1F90 01 0:0 0:0 0 0 0 1",
        "1: 0200007F:9999 0100007F:1F90 01 0:0 0:0 0 1000 0 2",
    ]
    (tmp_path / "tcp").write_text("\n".join(rows))
    monkeypatch.setattr(owner, "TABLE", tmp_path / "tcp")
    assert owner.holder(("127.0.0.1", 0x9999), ("127.0.0.1", 0x1F90)) == 0
    assert owner.holder(("127.0.0.2", 0x9999), ("127.0.0.1", 0x1F90)) == 1000
    assert owner.holder(("127.0.0.3", 0x9999), ("127.0.0.1", 0x1F90)) is None


def test_what_init_is_given_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    given = tmp_path / "preprocessing.json"
    words = ("--class-names", "0,1,2,3,4,5,6,7,8,9", "--out", str(given))
    assert fedalloy("preprocessing", "digits", *words).code == 0
    before = os.umask(0)
    try:
        said = fedalloy(
            "deploy", "init", str(tmp_path / "made"), "--clients", "2", "--data", "digits",
            "--class-names", "0,1,2,3,4,5,6,7,8,9", "--preprocessing", str(given),
        )  # fmt: skip
    finally:
        os.umask(before)
    assert said.code == 0, said.err
    loose = [str(one) for one in (tmp_path / "made").rglob("*") if one.stat().st_mode & 0o077]
    assert loose == []
    assert json.loads((tmp_path / "made" / "server" / "preprocessing.json").read_text())


WAIT = """
import sys, time
from fedalloy.engines.processes import end_after
end_after(int(sys.argv[1]), 0.05)
print("watching", flush=True)
time.sleep(600)
"""


def test_a_run_ends_with_its_superlink() -> None:
    """Flower's process of a run would go on for ever after its server was killed, and keep the run's folder locked."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as link:
        command = [sys.executable, "-c", WAIT, str(link.pid)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as run:
            assert run.stdout
            assert run.stdout.readline() == b"watching\n"
            assert run.poll() is None
            link.kill()  # not waited for: it is over, but still in the list of processes
            assert run.wait(60) == 1
