"""Who may reach a running server, and what a key is good for: a real SuperLink, without sites."""

import asyncio
import datetime
import json
import os
import re
import shutil
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tomli_w
from fastapi.routing import iter_route_contexts
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Message,
    Metadata,
    ObjectTree,
    PullObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.error import FlowerError
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.supercore.routers import health
from flwr.supercore.routers.runtime import create_runtime_router, responses_router
from flwr.superlink.routers.control import router as control
from flwr.superlink.routers.fleet.router import router as fleet
from signing import signed
from test_deployment import Federation, until

from fedalloy.deploy import knock
from fedalloy.deploy.bound import LAST, Bound
from fedalloy.deploy.credentials import make_certificates, make_site_key, renew_certificate
from fedalloy.deploy.deploy import free_port
from fedalloy.deploy.gate import OPEN, Gate, Roster
from fedalloy.deploy.roster import read_key
from terminal import fedalloy

pytestmark = [pytest.mark.xdist_group("deployment"), pytest.mark.timeout(300)]

ROUTERS = [control, create_runtime_router("SuperLink"), responses_router, health.router]
INSIDE = sorted(
    {str(route.path) for router in ROUTERS for route in iter_route_contexts(router.routes)}
    | {path for _, path in PROTOBUF_REQUEST_TYPES if not path.startswith("/v1/fleet/")}
    | {"/", "/docs", "/openapi.json", "/redoc", "/docs/oauth2-redirect"}
)
FLEET = sorted(str(vars(route)["path"]) for route in fleet.routes)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    before = os.umask(0)  # the laxest there is
    try:
        found = Federation(tmp_path_factory.mktemp("access") / "made")
        try:
            found.start_server()
            yield found
        finally:
            found.end()
    finally:
        os.umask(before)


def outside(server: Federation) -> httpx.Client:
    context = ssl.create_default_context(cafile=server.folder / "credentials" / "ca.pem")
    return httpx.Client(base_url=f"https://{server.made.address}", verify=context, timeout=10)


def nodes(server: Federation) -> Any:
    return server.made.flwr("supernode", "list", "fedalloy", "--format", "json")


def raw(server: Federation, request: bytes) -> bytes:
    """Bytes in, bytes out, over TLS."""
    host, _, port = server.made.address.rpartition(":")
    context = ssl.create_default_context(cafile=server.folder / "credentials" / "ca.pem")
    with (
        socket.create_connection((host, int(port)), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname=host) as line,
    ):
        line.sendall(request)
        return line.recv(4096)


METHODS = ("POST", "GET", "HEAD", "PUT", "DELETE", "OPTIONS")


def test_no_route_answers_a_stranger(server: Federation, tmp_path: Path) -> None:
    """With the authority's certificate and the address alone, or with a key of one's own."""
    make_site_key(tmp_path)
    liar = {"authorization": "Bearer x", "host": "127.0.0.1"}
    with outside(server) as client:
        for headers, methods in (({}, METHODS), (signed(tmp_path), METHODS[:2]), (liar, METHODS[:2])):
            for path in INSIDE:
                for method in methods:
                    assert client.request(method, path, headers=headers).status_code == 404, (method, path)
            for path in FLEET:
                wanted = 401 if path in OPEN else 404
                assert client.post(path, headers=headers, content=b"x").status_code == wanted, path


TYPE = """
import json, sys
from flwr.cli.app import app
for words in json.loads(sys.argv[1]):
    try:
        app(words, standalone_mode=False)
    except BaseException as error:
        print(error)
    print("next command", flush=True)
"""


def test_flowers_commands_do_nothing_for_a_stranger(server: Federation, tmp_path: Path) -> None:
    """Register, list, run, stop, pull logs: all fail outside; asked for by the owner, nothing has changed."""
    make_site_key(tmp_path)
    link = {"address": server.made.address, "root-certificates": str(server.folder / "credentials/ca.pem")}
    (tmp_path / "config.toml").write_text(
        tomli_w.dumps({"superlink": {"default": "fedalloy", "fedalloy": link}})
    )
    environment = {**server.made.environment, "FLWR_HOME": str(tmp_path)}
    node = str(server.made.roster.entries["site-1"]["node"])
    commands = {
        "register": ("supernode", "register", str(tmp_path / "key.pub"), "fedalloy"),
        "unregister": ("supernode", "unregister", node, "fedalloy"),
        "sites": ("supernode", "list", "fedalloy"),
        "list": ("ls", "fedalloy"),
        "run": ("run", str(server.folder / "app"), "fedalloy"),
        "stop": ("stop", "1", "fedalloy"),
        "log": ("log", "1", "fedalloy", "--show"),
    }

    typed = [[*words, *(() if words[0] == "log" else ("--format", "json"))] for words in commands.values()]
    done = subprocess.run(
        [sys.executable, "-c", TYPE, json.dumps(typed)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=True,
    )
    said = dict(zip(commands, done.stdout.split("next command")[:-1], strict=True))
    assert [name for name, words in said.items() if "404 Not Found" not in words] == [], said
    known = {int(one["node-id"]) for one in nodes(server)["nodes"]}
    assert known == server.made.roster.clients.keys()
    assert server.made.flwr("ls", "fedalloy", "--format", "json")["runs"] == []


def test_only_the_fleet_port_listens_outside(server: Federation) -> None:
    """Control is bound to this machine's own address, another port of it."""
    host, _, port = server.made.control.rpartition(":")
    assert host == "127.0.0.1"
    assert server.made.address.rpartition(":")[2] != port


ASK = """
import http.client, ssl, sys
line = http.client.HTTPSConnection("127.0.0.1", int(sys.argv[1]), context=ssl._create_unverified_context())
line.request("GET", "/health")
print(line.getresponse().status)
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only Linux tells who holds a connection")
@pytest.mark.parametrize("user", [None, 65534])
def test_control_is_for_its_owner_alone(server: Federation, user: int | None) -> None:
    if user is not None and os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    words = ["/usr/bin/env", "python3", "-c", ASK, server.made.control.rpartition(":")[2]]
    if user is None:
        words[:2] = [sys.executable]
    elif shutil.which("python3", path="/usr/bin:/usr/local/bin") is None:
        pytest.skip("no Python that everybody may start")
    env = {"PATH": "/usr/bin:/usr/local/bin"} if user else dict(os.environ)
    done = subprocess.run(words, user=user, env=env, capture_output=True, text=True, cwd="/", check=False)
    assert done.stdout.strip() == ("403" if user else "200"), done.stderr


@pytest.mark.parametrize(
    "target",
    [
        "//v1/control/list-nodes",
        "/v1//control/list-nodes",
        "/v1/fleet/../control/list-nodes",
        "/v1/fleet/%2e%2e/control/list-nodes",
        "/v1/fleet/..%2fcontrol/list-nodes",
        "/V1/CONTROL/LIST-NODES",
        "/v1/fleet/pull-messages/../../control/list-nodes",
        "/v1/fleet/pull%2dmessages",
        "/v1/fleet/pull-messages/",
        "/v1/control/list-nodes?x=/v1/fleet/pull-messages",
        "https://127.0.0.1/v1/control/list-nodes",
        "/v1/fleet/pull-messages;/v1/control/list-nodes",
        "*",
    ],
)
def test_no_spelling_of_a_path_gets_around_the_gate(server: Federation, target: str) -> None:
    """Not even with the key of a site."""
    headers = signed(server.folder / "sites" / "site-0")
    lines = [f"POST {target} HTTP/1.1", "Host: 127.0.0.1", "X-Forwarded-For: 127.0.0.1", "Content-Length: 0"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    answer = raw(server, ("\r\n".join(lines) + "\r\n\r\n").encode())
    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")), answer


def test_neither_websockets_nor_http_2_get_around_it(server: Federation) -> None:
    upgrade = (
        "GET /v1/control/list-nodes HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    )
    upgrade += "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    assert raw(server, upgrade.encode()).startswith(b"HTTP/1.1 404")
    assert b"HTTP/1.1 40" in raw(server, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")


def test_a_site_acts_for_itself_alone(server: Federation) -> None:
    """It may pull its own messages, not another's, nor answer in another's name; no Host header changes that."""
    entries = server.made.roster.entries
    mine, other = entries["site-0"]["node"], entries["site-1"]["node"]
    key = server.folder / "sites" / "site-0"
    with outside(server) as client:

        def post(path: str, body: Any, **more: str) -> int:
            sent = body.SerializeToString()
            return client.post(path, headers={**signed(key), **more}, content=sent).status_code

        assert post("/v1/fleet/pull-messages", PullMessagesRequest(node=Node(node_id=mine))) == 200
        assert post("/v1/fleet/pull-messages", PullMessagesRequest(node=Node(node_id=other))) == 401
        lie = Message(metadata=Metadata(src_node_id=other, run_id=1))
        forged = PushMessagesRequest(node=Node(node_id=mine), messages_list=[lie])
        assert post("/v1/fleet/push-messages", forged) >= 400
        trick = {
            "host": "x/v1/runtime/pull-object?"
        }  # Flower takes its path, and whether to look at keys, from it
        asked = PullObjectRequest(node=Node(node_id=other), object_id="0" * 64, run_id=1)
        assert post("/v1/fleet/pull-object", asked, **trick) == 401
    assert "speaks as another node" in server.log("server")


def test_a_removed_key_is_out_and_a_new_one_in(server: Federation) -> None:
    """While the server runs: a rotation keeps the client, a removal ends it."""
    place = server.folder / "sites" / "site-2"
    old = signed(place)
    was = server.made.roster.entries["site-2"]
    body = PullMessagesRequest(node=Node(node_id=was["node"])).SerializeToString()
    with outside(server) as client:
        assert client.post("/v1/fleet/pull-messages", headers=old, content=body).status_code == 200
        make_site_key(place)
        until(lambda: server.made.roster.entries.get("site-2", was)["key"] != was["key"], "the new key", 30)
        now = server.made.roster.entries["site-2"]
        assert now["client"] == was["client"] == 2
        assert now["node"] != was["node"]
        assert client.post("/v1/fleet/pull-messages", headers=old, content=body).status_code == 401
        body = PullMessagesRequest(node=Node(node_id=now["node"])).SerializeToString()
        new = signed(place)
        assert client.post("/v1/fleet/pull-messages", headers=new, content=body).status_code == 200
        (place / "key.pub").rename(place / "away")
        until(lambda: "site-2" not in server.made.roster.entries, "the key to be out", 30)
        assert client.post("/v1/fleet/pull-messages", headers=new, content=body).status_code == 401


def test_the_certificate_is_renewed_without_a_restart(server: Federation) -> None:
    def greeted() -> bytes:
        host, _, port = server.made.address.rpartition(":")
        context = ssl.create_default_context(cafile=server.folder / "credentials" / "ca.pem")
        with (
            socket.create_connection((host, int(port)), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname=host) as line,
        ):
            return line.getpeercert(binary_form=True) or b""

    before = greeted()
    renew_certificate(server.folder / "credentials")
    until(lambda: greeted() != before, "the new certificate", 15)


def test_nothing_is_readable_by_others(server: Federation) -> None:
    """The deployment was made, and its server started, under umask 000."""
    loose = []
    for name in ("credentials", "sites", "server", ".flwr"):
        for path in [server.folder / name, *(server.folder / name).rglob("*")]:
            if stat.S_IMODE(path.stat().st_mode) & 0o077 and not path.is_symlink():
                loose.append(str(path.relative_to(server.folder)))
    assert loose == []
    assert (server.folder / "server" / "superlink.db").exists()


# A site that is not let in reads why


@pytest.fixture
def bundle(server: Federation, tmp_path: Path) -> Path:
    """The folder of site 0, with a key that nobody knows."""
    place = tmp_path / "site-0"
    shutil.copytree(server.folder / "sites" / "site-0", place)
    make_site_key(place)
    return place


def test_why_a_site_is_not_let_in(
    server: Federation, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, known = server.made.address, server.folder / "sites" / "site-0"
    assert knock.refusal(known, address, 0) is None
    assert knock.refusal(known, f"127.0.0.1:{free_port()}", 0) is None  # nobody there: it goes on trying
    why = knock.refusal(bundle, address, 0)
    assert why
    assert why.startswith("this key is not registered: ")
    assert "fedalloy deploy key DIR site-0 --pub key.pub" in why
    make_certificates(tmp_path / "other", ["127.0.0.1"])
    shutil.copy(tmp_path / "other" / "ca.pem", bundle / "ca.pem")
    assert "does not prove who it is" in (knock.refusal(bundle, address, 0) or "")

    class Late(datetime.datetime):
        @classmethod
        def now(cls, zone: Any = None) -> Any:
            return datetime.datetime.now(zone) - datetime.timedelta(seconds=500)

    shim = SimpleNamespace(datetime=Late, UTC=datetime.UTC)
    monkeypatch.setattr(knock, "datetime", shim)
    late = knock.refusal(known, address, 0) or ""
    assert re.fullmatch(rf"the clock of this machine is \d+ s behind that of {address}; set it", late)


def test_a_site_with_a_strangers_key_ends_with_the_reason(server: Federation, bundle: Path) -> None:
    """Flower's SuperNode ends with code 0 and no word; the site's command does not."""
    said = fedalloy("deploy", "site", str(bundle), "--patience", "0")  # which is told before it starts one
    assert said.code == 2
    assert "this key is not registered" in " ".join(said.err.split())
    assert "this key is not registered" in " ".join(said.out.split())  # at once, too


BROKEN = """
import sys, threading, time
sys.argv = ["node.py", "1"]
from fedalloy.deploy import node
node.flower_supernode = lambda: threading.Thread(target=time.sleep, args=(600,)).start()
node.main()
"""


def test_a_supernode_whose_connection_broke_ends() -> None:
    """So that it is started again; a thread of Flower's would keep the process, deaf, for ever."""
    assert subprocess.run([sys.executable, "-c", BROKEN], timeout=120, check=False).returncode == 1


@pytest.mark.parametrize(
    ("name", "why"), [("key", "holds no private key"), ("ca.pem", "holds no certificate")]
)
def test_a_damaged_bundle(server: Federation, bundle: Path, name: str, why: str) -> None:
    for there in (True, False):
        if there:
            (bundle / name).write_text("x")
        else:
            (bundle / name).unlink()
        said = fedalloy("deploy", "site", str(bundle))
        assert said.code == 2
        assert why in " ".join(said.err.split())


# The gate by itself


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 200),
        ({"content-length": str(2**40)}, 413),
        ({"content-length": "-1"}, 413),
        ({"content-length": "many"}, 413),
        ({"flwr-signature": "AAAA"}, 401),
        ({"flwr-timestamp": "2020-01-01T00:00:00+00:00"}, 401),
        ({"flwr-timestamp": "2020-01-01T00:00:00"}, 401),
        ({"flwr-public-key": "?"}, 401),
    ],
)
def test_bodies_of_strangers_are_not_read(tmp_path: Path, changes: dict[str, str], status: int) -> None:
    make_site_key(tmp_path)
    file = tmp_path / "roster.json"
    file.write_text(json.dumps({"site-0": {"pem": read_key(tmp_path / "key.pub")}}))
    got: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert dict(scope["headers"])[b"host"] == b"fleet"
        got.append(200)

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        got.append(message.get("status", 0))

    headers = {**signed(tmp_path), "content-length": "3", "host": "evil/x?", **changes}
    scope = {
        "type": "http",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "method": "POST",
        "path": "/v1/fleet/pull-messages",
        "raw_path": b"/v1/fleet/pull-messages",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    asyncio.run(Gate(app, Roster(file))(scope, receive, send))
    assert got[0] == status


def test_objects_are_for_the_node_they_were_made_for() -> None:
    """Who knows the hash of what was made for another gets nothing by it, and can take nothing away."""
    tree = ObjectTree(object_id="message", children=[ObjectTree(object_id="array")])
    answered: list[str] = []

    def pull(request: Any) -> PullMessagesResponse:
        mine = [tree] if request.node.node_id == 1 else []
        return PullMessagesResponse(message_object_trees=mine)

    bound = Bound(
        {
            "pull_messages": pull,
            "pull_object": lambda request: answered.append(request.object_id),
            "confirm_message_received": lambda request: answered.append(request.message_object_id),
        }
    )
    for node in (1, 2):
        bound.pull_messages(PullMessagesRequest(node=Node(node_id=node)))
    for name in ("array", "message"):
        bound.pull_object(PullObjectRequest(node=Node(node_id=1), object_id=name))
        with pytest.raises(FlowerError):
            bound.pull_object(PullObjectRequest(node=Node(node_id=2), object_id=name))
        with pytest.raises(FlowerError):
            bound.confirm_message_received(
                ConfirmMessageReceivedRequest(node=Node(node_id=2), message_object_id=name)
            )
    bound.confirm_message_received(
        ConfirmMessageReceivedRequest(node=Node(node_id=1), message_object_id="message")
    )
    assert answered == ["array", "message", "message"]
    tree = ObjectTree(object_id="next")
    for _ in range(LAST):
        bound.pull_messages(PullMessagesRequest(node=Node(node_id=1)))
    with pytest.raises(FlowerError):
        bound.pull_object(PullObjectRequest(node=Node(node_id=1), object_id="array"))


def test_flowers_handlers_are_bound(server: Federation) -> None:
    """In the server that runs: an object that was not made for this site is refused before it is looked for."""
    mine = server.made.roster.entries["site-0"]["node"]
    asked = PullObjectRequest(node=Node(node_id=mine), object_id="0" * 64, run_id=1)
    with outside(server) as client:
        key = signed(server.folder / "sites" / "site-0")
        answer = client.post("/v1/fleet/pull-object", headers=key, content=asked.SerializeToString())
    assert answer.status_code == 403
    assert "asks for what is not for it" in server.log("server")
