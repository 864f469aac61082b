"""The engine of a real federation: mail goes out over Flower's grid, and every wait has an end."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import RunNotRunningException

from fedalloy import __version__
from fedalloy.client import Info
from fedalloy.data.preprocessing import Preprocessing
from fedalloy.errors import FedAlloyError
from fedalloy.flower.records import FACTS, mail_record, read_reply
from fedalloy.flower.site import HELLO
from fedalloy.flower.terms import Terms
from fedalloy.nets.base import Inputs
from fedalloy.wire import Mail, Reply
from fedalloy.workshop import Workshop

PAUSE = 0.2  # seconds between two looks for replies
KINDS = {"train": "train", "evaluate": "evaluate", "tell": "query"}
SPARE = 60.0  # seconds that a message lives longer than we wait for it, so that the limit is ours
ROOM = 64 * 1024 * 1024  # bytes that a reply may take beyond what its slots declare


@dataclass(frozen=True)
class Guest:
    """A site that has said hello."""

    node: int
    client: int
    samples: int
    inputs: Inputs
    columns: tuple[str, ...] = ()  # of a table


class Lobby:
    """Who is there: nodes say which client they are, how much they hold and what their samples look like."""

    def __init__(
        self, grid: Grid, clients: int, roster: Callable[[], dict[int, int] | None] = lambda: None
    ) -> None:
        self.grid, self.clients, self.roster = grid, clients, roster
        self.guests: dict[int, Guest] = {}
        self.agreed: Preprocessing | None = None  # told to whoever comes, once it is known
        self.turned_away: dict[int, str] = {}  # by node
        self._asked: dict[str, int] = {}  # message: node
        self._seen: set[int] = set()

    def fill(self, wanted: int, limit: float) -> None:
        """Wait until so many sites have joined."""
        deadline = time.monotonic() + limit
        while len(self.guests) < wanted:
            if time.monotonic() > deadline:
                missing = ", ".join(str(k) for k in range(self.clients) if k not in self.guests)
                away = "".join(f"; node {node} {why}" for node, why in self.turned_away.items())
                raise FedAlloyError(
                    f"{len(self.guests)} of {wanted} sites joined within {limit:g} s; missing: client {missing}{away}"
                )
            self.look()
            time.sleep(PAUSE)

    def look(self) -> None:
        """Greet nodes not seen before, and hear those who answer; waits for nobody."""
        self.guests = {client: guest for client, guest in self.guests.items() if self.admits(guest)}
        present = set(self.grid.get_node_ids())
        self._seen &= present  # whoever left has to say hello again
        for node in sorted(present - self._seen):
            self._seen.add(node)
            told = {"preprocessing": self.agreed.to_json()} if self.agreed else {}
            hello = RecordDict({HELLO: ConfigRecord({"version": __version__, **told})})
            for message in self.grid.push_messages([Message(hello, node, "query")]):
                self._asked[message] = node
        for message, answer in pulled(self.grid, list(self._asked)):
            self._greet(self._asked.pop(message), answer)

    def admits(self, guest: Guest) -> bool:
        """Whether the key of this node is, now, the key of the client that it says it is."""
        roster = self.roster()
        return roster is None or roster.get(guest.node) == guest.client

    def _greet(self, node: int, answer: Message | str) -> None:
        try:
            if isinstance(answer, str):
                raise FedAlloyError(answer)
            guest = _guest(node, answer, self.clients)
            if not self.admits(guest):
                raise FedAlloyError(f"claims to be client {guest.client}, whose key it does not have")
            known = self.guests.get(guest.client)
            if known and known.node != node and known.node in self._seen:
                raise FedAlloyError(f"claims to be client {guest.client}, which is node {known.node}")
            if any(other.inputs != guest.inputs for other in self.guests.values()):
                raise FedAlloyError(f"has samples of another kind: {guest.inputs}")
            if self.agreed and guest.inputs != self.agreed.inputs:
                raise FedAlloyError(f"has samples of another kind than was agreed on: {guest.inputs}")
        except FedAlloyError as error:
            self.turned_away[node] = str(error)
        else:
            self.guests[guest.client] = guest


def _guest(node: int, answer: Message, clients: int) -> Guest:
    if answer.has_error():
        raise FedAlloyError(f"could not say hello: {answer.error.reason}")
    facts = answer.content.get(FACTS)
    try:
        if not isinstance(facts, ConfigRecord):
            raise TypeError
        client, samples, version = facts["client"], facts["samples"], facts["version"]
        kind, shape, classes, vocab = json.loads(str(facts["inputs"]))
        inputs = Inputs(kind, tuple(shape), classes, vocab)
        columns = json.loads(str(facts.get("columns", "[]")))
        if type(client) is not int or type(samples) is not int or samples < 0:
            raise TypeError
        if not (isinstance(columns, list) and all(type(name) is str for name in columns)):
            raise TypeError
        if columns and ((len(columns),) != inputs.shape or len(set(columns)) != len(columns)):
            raise ValueError
    except (KeyError, ValueError, TypeError):
        raise FedAlloyError("said hello in words nobody understands") from None
    if version != __version__:
        raise FedAlloyError(f"runs FedAlloy {version!r}, the server {__version__}")
    if not 0 <= client < clients:
        raise FedAlloyError(f"claims to be client {client} of {clients}")
    return Guest(node, client, samples, inputs, tuple(columns))


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
            return [(messages[0], f"sent what cannot be unpacked: {error}")]
        return [found for message in messages for found in pulled(grid, [message])]
    return [(message, answers[message]) for message in messages if message in answers]


class Post:
    """Carries mail to sites. What the server can do itself, scoring on its own test set, it does itself."""

    def __init__(
        self, workshop: Workshop, lobby: Lobby, run: str, terms: Terms, checkpoint_every: int = 1
    ) -> None:
        self.workshop, self.lobby, self.run = workshop, lobby, run
        self.limit, self.least, self.every = terms.round_limit, terms.least_replies, checkpoint_every
        sites = [workshop.sites.named(model) for model in workshop.sites.models]
        slots = [[spec for way in ("up", "told") for spec in site.specs(way).values()] for site in sites]
        self.most_bytes = ROOM + 2 * max(sum(spec.bytes for spec in each) for each in slots)

    def carry(self, mails: Sequence[Mail]) -> Iterator[Reply]:
        """A reply for each mail: an answer, or why there is none."""
        if mails and mails[0].errand == "score":
            yield from map(self.workshop.open, mails)
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
        deadline = time.monotonic() + self.limit
        while waiting and time.monotonic() < deadline:
            for message in [name for name in waiting if not self.lobby.admits(asked[name])]:
                yield silent(waiting.pop(message), "was let out: its key is no longer in")
            yield from self._answers(waiting)
            if waiting:
                time.sleep(PAUSE)
        for mail in waiting.values():
            yield silent(mail, f"did not answer within {self.limit:g} s")

    def record(self, mail: Mail) -> RecordDict:
        """A mail with what its site has to know of the run: private state after `checkpoint` may be asked for again."""
        info: Info = self.workshop.federation.info
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

    def _answers(self, waiting: dict[str, Mail]) -> list[Reply]:
        """The answers that are there; one that cannot even be unpacked harms nobody else's."""
        replies = []
        for message, answer in pulled(self.lobby.grid, list(waiting)):
            mail = waiting.pop(message)
            replies.append(silent(mail, answer) if isinstance(answer, str) else self._read(answer, mail))
        return replies

    def _read(self, answer: Message, mail: Mail) -> Reply:
        if answer.has_error():
            return silent(mail, f"failed: {answer.error.reason}")
        try:
            return read_reply(answer.content, mail.client, self.most_bytes)
        except FedAlloyError as error:
            return silent(mail, str(error))


def _client(reply: Reply) -> int:
    return reply.client


def silent(mail: Mail, why: str) -> Reply:
    """What stands for an answer that did not come."""
    return Reply(mail.round, mail.client, error=why)
