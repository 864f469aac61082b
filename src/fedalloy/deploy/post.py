"""The engine of a real federation: mail goes out over Flower's grid, and every wait has an end."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import RunNotRunningException

from fedalloy.core.net import Inputs
from fedalloy.core.version import VERSION
from fedalloy.core.views import Info
from fedalloy.core.wire import Mail, Reply
from fedalloy.data.preprocessing import Preprocessing
from fedalloy.deploy.hello import Guest, read_hello
from fedalloy.deploy.records import mail_record, read_reply
from fedalloy.deploy.site import HELLO
from fedalloy.deploy.terms import Terms
from fedalloy.errors import FedAlloyError, plain
from fedalloy.round.runtime import ClientRuntime

PAUSE = 0.2  # seconds between two looks for replies
KINDS = {"train": "train", "evaluate": "evaluate", "tell": "query"}
LET_OUT = "was let out: its key is no longer in"
SPARE = 60.0  # seconds that a message lives longer than we wait for it, so that the limit is ours
ROOM = 64 * 1024 * 1024  # bytes that a reply may take beyond what its slots declare


class Lobby:
    """Who is there: nodes say which client they are, how much they hold and what their samples look like."""

    def __init__(
        self,
        grid: Grid,
        clients: int,
        roster: Callable[[], dict[int, int] | None] = lambda: None,
        *,
        norm: Inputs | None = None,
        classes: int | None = None,
    ) -> None:
        self.grid, self.clients, self.roster = grid, clients, roster
        self.norm = norm  # what all samples look like; else more than half of all sites have to agree on it
        self.classes = classes  # how many there are, where that is agreed on
        self.guests: dict[int, Guest] = {}
        self.agreed: Preprocessing | None = None  # told to whoever comes, once it is known
        self.turned_away: dict[int, str] = {}  # by node
        self._asked: dict[str, int] = {}  # message: node
        self._seen: set[int] = set()

    def fill(self, wanted: int, limit: float) -> None:
        """Wait until so many sites have joined whose samples are of one kind."""
        deadline = time.monotonic() + limit
        while True:  # however slow the machine is, it looks once
            self.look()
            if self._agree(wanted) and len(self.guests) >= wanted:
                return
            if time.monotonic() > deadline:
                raise FedAlloyError(self._missing(wanted, limit))
            time.sleep(PAUSE)

    def _agree(self, wanted: int) -> bool:
        """Whether it is known what samples look like: never decided by who came first."""
        if self.norm is None and self.guests:
            kinds = Counter(guest.inputs for guest in self.guests.values())
            kind, votes = kinds.most_common(1)[0]
            if votes >= max(wanted, self.clients // 2 + 1):
                self.norm = kind
        for client, guest in list(self.guests.items()):
            if self.norm is not None and guest.inputs != self.norm:
                self.turned_away[guest.node] = self._strange(guest)
                del self.guests[client]
        return self.norm is not None

    def _missing(self, wanted: int, limit: float) -> str:
        """Who did not come, who was turned away, and whose samples nobody could compare."""
        self._agree(0)
        missing = ", ".join(str(k) for k in range(self.clients) if k not in self.guests)
        away = "".join(f"; node {node} {why}" for node, why in self.turned_away.items())
        undecided = ""
        if self.norm is None and len(self.guests) >= wanted:
            found = ", ".join(f"client {k}: {guest.inputs}" for k, guest in sorted(self.guests.items()))
            undecided = (
                f"; no more than half of all sites agree on the samples ({found}): set the term inputs"
            )
        joined = f"{len(self.guests)} of {wanted} sites joined within {limit:g} s"
        return f"{joined}; missing: client {missing}{away}{undecided}"

    def _strange(self, guest: Guest) -> str:
        return f"has samples of another kind: {guest.inputs}"

    def look(self) -> None:
        """Greet nodes not seen before, and hear those who answer; waits for nobody."""
        self.guests = {client: guest for client, guest in self.guests.items() if self.admits(guest)}
        present = set(self.grid.get_node_ids())
        self._seen &= present  # whoever left has to say hello again
        for node in sorted(present - self._seen):
            self._seen.add(node)
            told = {"preprocessing": self.agreed.to_json()} if self.agreed else {}
            hello = RecordDict({HELLO: ConfigRecord({"version": VERSION, **told})})
            for message in self.grid.push_messages([Message(hello, node, "query")]):
                self._asked[message] = node
        for message, answer in pulled(self.grid, list(self._asked)):
            self._greet(self._asked.pop(message), answer)

    def admits(self, guest: Guest) -> bool:
        """Whether the key of this node is, now, the key of the client that it says it is."""
        roster = self.roster()
        return roster is None or roster.get(guest.node) == guest.client

    def admitted(self, node: int) -> bool:
        """Whether this node is a guest whose key is still in."""
        return any(guest.node == node and self.admits(guest) for guest in self.guests.values())

    def guests_at(self, nodes: set[int]) -> list[Guest]:
        """Who these nodes are."""
        return [guest for guest in self.guests.values() if guest.node in nodes]

    def _greet(self, node: int, answer: Message | str) -> None:
        try:
            if isinstance(answer, str):
                raise FedAlloyError(answer)
            guest = read_hello(node, answer, self.clients)
            if not self.admits(guest):
                raise FedAlloyError(f"claims to be client {guest.client}, whose key it does not have")
            known = self.guests.get(guest.client)
            if known and known.node != node and known.node in self._seen:
                raise FedAlloyError(f"claims to be client {guest.client}, which is node {known.node}")
            if self.classes not in (None, guest.inputs.classes):
                raise FedAlloyError(f"knows {guest.inputs.classes} classes, {self.classes} are agreed on")
            if self.norm is not None and guest.inputs != self.norm:
                raise FedAlloyError(self._strange(guest))
        except FedAlloyError as error:
            self.turned_away[node] = str(error)
        else:
            self.guests[guest.client] = guest


def pulled(grid: Grid, messages: list[str]) -> list[tuple[str, Message | str]]:
    """The answers that are there, by the message they answer; of one that cannot be unpacked, why."""
    if not messages:
        return []
    try:
        answers = {answer.metadata.reply_to_message_id: answer for answer in grid.pull_messages(messages)}
    except (httpx.HTTPError, RunNotRunningException):  # the way is broken, or the run was stopped
        raise
    except Exception as error:  # whatever Flower's reader says to objects that somebody made up
        if len(messages) == 1:
            return [(messages[0], f"sent what cannot be unpacked: {plain(error)}")]
        return [found for message in messages for found in pulled(grid, [message])]
    return [(message, answers[message]) for message in messages if message in answers]


class Post:
    """Carries mail to sites. What the server can do itself, scoring on its own test set, it does itself."""

    def __init__(
        self, runtime: ClientRuntime, lobby: Lobby, run: str, terms: Terms, checkpoint_every: int = 1
    ) -> None:
        self.runtime, self.lobby, self.run = runtime, lobby, run
        self.limit, self.least, self.every = terms.round_limit, terms.least_replies, checkpoint_every
        sites = [runtime.replicas.named(model) for model in runtime.replicas.models]
        slots = [[spec for way in ("up", "query") for spec in site.specs(way).values()] for site in sites]
        self.most_bytes = ROOM + 2 * max(sum(spec.bytes for spec in each) for each in slots)

    def carry(self, mails: Sequence[Mail]) -> Iterator[Reply]:
        """A reply for each mail: an answer, or why there is none."""
        if mails and mails[0].errand == "score":
            yield from map(self.runtime.handle, mails)
            return
        lost: list[Reply] = []
        for reply in self._exchange(mails):
            lost += [reply] if reply.error else []
            yield reply
        if mails and mails[0].errand == "train" and len(mails) - len(lost) < self.least:
            why = "; ".join(f"client {reply.client} {reply.error}" for reply in sorted(lost, key=_client))
            raise FedAlloyError(
                f"round {mails[0].round} brought {len(mails) - len(lost)} replies, {self.least} are needed: {why}"
            )

    def close(self) -> None:
        """Nothing to close: the grid is Flower's."""

    def _exchange(self, mails: Sequence[Mail]) -> Iterator[Reply]:
        """All are waited for before any is handed on: a reply counts only if its key is still in then."""
        self.lobby.look()
        waiting: dict[str, Mail] = {}
        asked: dict[str, Guest] = {}
        for mail in mails:
            guest = self.lobby.guests.get(mail.client)
            sent = self._push(mail, guest) if guest else None
            if sent is None or guest is None:
                yield silent(mail, "is not connected")
            else:
                waiting[sent], asked[sent] = mail, guest
        all_mails, replies = dict(waiting), dict[str, Reply]()
        deadline = time.monotonic() + self.limit
        while waiting:
            for message in [name for name in waiting if not self.lobby.admits(asked[name])]:
                del waiting[message]
            replies |= self._answers(waiting)
            if time.monotonic() > deadline:
                break
            if waiting:
                time.sleep(PAUSE)
        for message, mail in all_mails.items():
            reply = replies.pop(message, None)
            if not self.lobby.admits(asked[message]):
                yield silent(mail, LET_OUT)
            else:
                yield reply or silent(mail, f"did not answer within {self.limit:g} s")

    def record(self, mail: Mail) -> RecordDict:
        """A mail with what its site has to know of the run: private state after `checkpoint` may be asked for again."""
        info: Info = self.runtime.federation.info
        safe = (mail.round - 1) // self.every * self.every
        agreed = self.lobby.agreed
        told = {"preprocessing": agreed.to_json()} if agreed else {}
        return mail_record(
            mail, run=self.run, checkpoint=safe, clients=info.clients, samples=info.samples, **told
        )

    def _push(self, mail: Mail, guest: Guest) -> str | None:
        kind, record = KINDS[mail.errand], self.record(mail)
        message = Message(record, guest.node, kind, ttl=self.limit + SPARE, group_id=str(mail.round))
        return next(iter(self.lobby.grid.push_messages([message])), None)

    def _answers(self, waiting: dict[str, Mail]) -> dict[str, Reply]:
        """The answers that are there; one that cannot even be unpacked harms nobody else's."""
        replies = {}
        for message, answer in pulled(self.lobby.grid, list(waiting)):
            mail = waiting.pop(message)
            replies[message] = silent(mail, answer) if isinstance(answer, str) else self._read(answer, mail)
        return replies

    def _read(self, answer: Message, mail: Mail) -> Reply:
        if answer.has_error():
            return silent(mail, f"failed: {plain(answer.error.reason)}")
        try:
            return read_reply(answer.content, mail.client, self.most_bytes)
        except FedAlloyError as error:
            return silent(mail, str(error))


def _client(reply: Reply) -> int:
    return reply.client


def silent(mail: Mail, why: str) -> Reply:
    """What stands for an answer that did not come."""
    return Reply(mail.round, mail.client, error=why)
