"""A site of a federation: it answers mail with its own data, and keeps its clients' private state on its own disk."""

import hashlib
import json
import logging
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS

from fedalloy.core.files import PRIVATE, kept_secret, private_folder, write_whole
from fedalloy.core.imports import Imports, foreign_in, outside
from fedalloy.core.version import VERSION
from fedalloy.core.views import Info
from fedalloy.core.wire import Mail, Reply, dump
from fedalloy.data import IID, Prepare, Preprocessing, Split, load, parse_augment
from fedalloy.data.assemble import fitted
from fedalloy.data.federation import Federation, federate
from fedalloy.data.totals import Totals
from fedalloy.deploy.audit import Audit
from fedalloy.deploy.door import RUN, asked, leave
from fedalloy.deploy.errors import SiteError, blamed
from fedalloy.deploy.hello import said_inputs
from fedalloy.deploy.journal import Journal, runs_of
from fedalloy.deploy.records import (
    FACTS,
    Facts,
    maskable_record,
    read_mail,
    reply_record,
)
from fedalloy.deploy.statistics import STATISTICS, shown, to_items
from fedalloy.deploy.steps import check_question
from fedalloy.deploy.terms import Settings, read_settings
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config
from fedalloy.experiment.run import Setup, one_thread
from fedalloy.mechanisms.privacy import Private, composed
from fedalloy.round.runtime import ClientRuntime, state_before
from fedalloy.trained.kept import keep_tested

HELLO = "hello"
DELTA = 1e-5  # of the epsilon that a site allows
log = logging.getLogger("fedalloy")


@dataclass(frozen=True)
class Share(Federation):
    """One site's own data; how many others there are, and how much they hold together, the server says."""

    known: Info = field(default=Info(1, 1))

    @cached_property
    def info(self) -> Info:
        return self.known


class Desk:
    """Where one client's mail is answered: its data, its nets, its vault."""

    def __init__(self, settings: Settings, node: Settings) -> None:
        with blamed("settings"):
            self.config, self.terms = read_settings({**_agreed(settings), **_own(node)})
        self.imports = Imports() if node.get("allow-code") is True else None
        with blamed("refused-code"):
            if self.imports is None and (names := foreign_in(self.config.model_dump())):
                raise outside(names, "the server")
            _refuse_the_hub(self.config, node)
        with blamed("wrong-client"):
            self.client = _client(node, self.config)
        self.only_masked = self.terms.masked or node.get("only-masked") is True
        self.state = Path(str(node.get("state", "fedalloy-state"))).expanduser()
        self._last: tuple[str, Share, Setup] | None = None
        with blamed("data"):
            self.federation = self._federation()
        with blamed("unfit"):
            self.setup = Setup(self.config, self.federation, imports=self.imports)
        self.sealer = self.setup.method.claimant("seal")
        self.most = float(node["most-epsilon"]) if "most-epsilon" in node else None
        if self.most is not None:
            with blamed("privacy-limit"):
                self._refuse_beyond(self.most)

    def hello(self, told: str = "") -> Facts:
        """What the server has to know before the first round; what was agreed on already must fit the data here."""
        dataset = self.federation.dataset
        if told and isinstance(self.federation, Share):
            dataset = self._settled(told)[0].dataset
        inputs = dataset.inputs
        if not told and isinstance(self.federation, Share) and dataset.kind == "tokens":
            inputs = replace(inputs, shape=(1,), vocab=1)  # its own numbers of words mean nothing to others
        columns = {"columns": json.dumps(dataset.feature_names)} if dataset.feature_names else {}
        return {
            **columns,
            "client": self.client,
            "samples": self._told(int(self.federation.sizes[self.client])),
            "version": VERSION,
            "inputs": said_inputs(inputs),
        }

    def answer(self, message: Message, context: Context | None = None) -> Message:
        """The answer to a message; one step of SecAgg+ keeps what it must remember in the context."""
        if RECORD_KEY_CONFIGS in message.content and context is not None:
            if message.metadata.message_type != "train":  # Flower would hand on any other kind unmasked
                raise SiteError("not-masked", "a step of secure aggregation came as another kind of message")
            with blamed("bad-message"):
                check_question(message.content.config_records[RECORD_KEY_CONFIGS])
            return secaggplus_mod(message, context, self._unmasked)
        if STATISTICS in message.content:
            if self.only_masked:
                raise SiteError("not-masked", "this site sends statistics only by secure aggregation")
            return Message(reply_record(self._statistics()), reply_to=message)
        with blamed("bad-message"):
            mail, facts = read_mail(message.content)
        if self.only_masked and mail.errand == "train":
            raise SiteError("not-masked", "this site sends updates only by secure aggregation")
        return Message(reply_record(self._do(mail, facts)), reply_to=message)

    def _unmasked(self, message: Message, context: Context) -> Message:
        """What SecAgg+ masks before it leaves."""
        if STATISTICS in message.content:
            return Message(maskable_record(self._statistics(), by_samples=False), reply_to=message)
        records = {key: record for key, record in message.content.items() if key != RECORD_KEY_CONFIGS}
        reply = self._do(*read_mail(RecordDict(records)))
        return Message(maskable_record(reply, by_samples=self.setup.method.weighed), reply_to=message)

    def _statistics(self) -> Reply:
        """How many training samples are here, and per channel or column the sums of their numbers and squares."""
        dataset = self.federation.dataset
        if not self.terms.computed or dataset.kind == "tokens":
            raise FedAlloyError(
                "this site sends no statistics: they are given in the terms, or there are none"
            )
        if self.sealer:
            raise FedAlloyError(f"{self.sealer} does not cover statistics: this site sends none")
        totals = Totals.of(
            dataset.kind, dataset.x[: dataset.train]
        )  # those of a simulation, for any test share
        log.info("statistics of %d numbers in %d columns leave this site", totals.count, len(totals.sums))
        return Reply(0, self.client, to_items(totals), samples=dataset.train)

    def _do(self, mail: Mail, facts: Facts) -> Reply:
        if mail.client != self.client:
            raise SiteError(
                "wrong-client", f"this site is client {self.client}, the mail is for client {mail.client}"
            )
        run = str(facts.get("run", ""))
        if not RUN.fullmatch(run):
            raise SiteError("bad-message", "this mail names no run")
        journal, checkpoint = Journal(self.state, run, self.client), int(facts.get("checkpoint", 0))
        with blamed("damaged-state"):
            journal.check(state_before(mail))
        runtime = self._runtime(journal, facts)
        runtime.vault.trim([self.client], checkpoint)
        if self.sealer:
            with blamed("answered"):
                self._once(journal, mail)
        if mail.errand == "train":
            journal.begin(mail.round)
        with one_thread():
            reply = runtime.handle(mail)
            if mail.errand == "evaluate":
                keep_tested(self.state, run, runtime, mail, self.config)
        if mail.errand == "train":
            journal.keep(mail.round, checkpoint)
        return replace(reply, samples=0, steps=0, seen=0, loss=0.0, seconds=0.0) if self.sealer else reply

    def _refuse_beyond(self, most: float) -> None:
        """Take no part in a run that could tell more of this site than it allows."""
        noise = self._noise
        if not noise:
            raise FedAlloyError(
                "this site takes part only where it adds the noise itself: method '...+private'"
            )
        spent = self._epsilon([noise] * self.config.rounds)
        if spent > most:
            raise FedAlloyError(f"this run may spend epsilon {spent:.2f}; this site allows {most:g}")

    def _refuse_more(self, journal: Journal, round: int) -> None:
        """Answer no round with which all runs of this site would spend more than it allows: a server may start many."""
        if self.most is None:
            return
        all_runs = {run: Journal(self.state, run, self.client).noises() for run in runs_of(self.state)}
        all_runs[journal.run] = {**all_runs.get(journal.run, {}), str(round): self._noise}
        spent = self._epsilon([noise for run in all_runs.values() for noise in run.values()])
        if spent > self.most:
            raise SiteError(
                "privacy-limit",
                f"with this round {len(all_runs)} runs would spend epsilon {spent:.2f}; this site allows {self.most:g}",
            )

    @property
    def _noise(self) -> float:
        """The noise that this site adds, over the length it is clipped to; 0 where it adds none."""
        return (
            self.sealer.noise if isinstance(self.sealer, Private) and self.sealer.where == "client" else 0.0
        )

    def _epsilon(self, noises: list[float]) -> float:
        """What rounds of this noise spend at this site's own delta: a server that names a large one gains nothing."""
        return composed([(noise, 1.0) for noise in noises], DELTA)

    def spent(self, message: Message) -> float | None:
        """Epsilon over all rounds of this run that were answered; None where this site adds no noise."""
        run = asked(message)["run"]
        if not run or not self._noise:
            return None
        return self._epsilon(list(Journal(self.state, run, self.client).noises().values()))

    def _told(self, samples: int) -> int:
        """How many samples the server is told of: where a part seals what leaves, only whether there are any."""
        return min(samples, 1) if self.sealer else samples

    def _once(self, journal: Journal, mail: Mail) -> None:
        """What is sealed leaves once a round: the same mail again gets the same answer, any other one none."""
        if mail.errand != "train":
            raise FedAlloyError(f"{self.sealer} does not cover tests at the sites: this one only trains")
        if not 1 <= mail.round <= self.config.rounds:
            raise FedAlloyError(f"round {mail.round} is none of the {self.config.rounds} that were agreed on")
        journal.hold(self.state / "secrets" / journal.run)
        self._refuse_more(journal, mail.round)
        digest = hashlib.sha256(dump(mail.items, {"config": self.config.toml()})).hexdigest()
        if not journal.answer(mail.round, digest, self._noise):
            raise FedAlloyError(
                f"round {mail.round} was answered already, to another mail; {self.sealer} allows one"
            )

    def _runtime(self, journal: Journal, facts: Facts) -> ClientRuntime:
        federation, setup = self.federation, self.setup
        if isinstance(federation, Share):
            federation, setup = self._settled(self._agreed(journal, facts))
            federation = replace(federation, known=Info(int(facts["clients"]), int(facts["samples"])))
        config = self.config
        on_global = config.personal_on_global and self.terms.sites == "dealt"
        return ClientRuntime(
            setup.method,
            setup.replicas,
            federation,
            config.local,
            journal.vault,
            config.seed,
            on_global,
            kept_secret(self.state / "secrets" / journal.run) if self.sealer else 0,
        )

    def _agreed(self, journal: Journal, facts: Facts) -> str:
        """What this run prepares samples by: as it was first told, and never anything else."""
        text = facts.get("preprocessing")
        if not isinstance(text, str):
            raise FedAlloyError("this mail does not say how samples are prepared")
        file = self.state / "preprocessing" / f"{journal.run}.json"
        if not file.exists():
            self._settled(text)
            private_folder(file.parent)
            write_whole(file, text.encode(), PRIVATE)
            log.info("run %s: %s", journal.run, shown(Preprocessing.from_json(text)))
        elif file.read_bytes() != text.encode():
            raise FedAlloyError("this run began with another preprocessing, which this site does not change")
        journal.hold(file)
        return text

    def _settled(self, text: str) -> tuple[Share, Setup]:
        """This site's data under what was agreed on; an error if they do not fit it."""
        if self._last is None or self._last[0] != text:
            agreed = Preprocessing.from_json(text, "the server's preprocessing")
            if agreed.class_names != self.terms.classes:
                raise FedAlloyError("the server's preprocessing names other classes than the terms")
            share = self._scaled(agreed) or self._share(agreed)
            self._last = (text, share, Setup(self.config, share, imports=self.imports))
        return self._last[1:]

    def _scaled(self, agreed: Preprocessing) -> Share | None:
        """The data as they are in memory, under other statistics; None where they have to be read anew."""
        share, own = self.federation, self.federation.dataset
        if not isinstance(share, Share) or own.kind == "tokens":
            return None
        if own.feature_names not in ((), agreed.feature_names):
            return None
        return replace(
            share,
            dataset=fitted(own, agreed),
            prepare=Prepare.of(agreed, parse_augment(self.config.augment)),
        )

    def _federation(self) -> Federation:
        return federate(**self.config.dealing) if self.terms.sites == "dealt" else self._share()

    def _share(self, agreed: Preprocessing | None = None) -> Share:
        root = Path(self.config.data_root) if self.config.data_root else None
        dataset = load(self.config.data, root, self.terms.classes, agreed)
        alone = federate(
            dataset, 1, IID(), self.config.seed, self.config.test_share, augment=self.config.augment
        )
        before, after = [0] * self.client, self.config.clients - self.client - 1
        return Share(alone.dataset, _alone(alone, before, after), alone.prepare)


def _alone(federation: Federation, before: list[int], after: int) -> Split:
    """The split in which one client of many holds everything."""
    split = federation.split

    def spread(offsets: torch.Tensor) -> torch.Tensor:
        return torch.tensor([*before, *offsets.tolist(), *offsets[-1:].tolist() * after])

    return replace(
        split,
        train_offsets=spread(split.train_offsets),
        test_offsets=spread(split.test_offsets),
        global_test=split.global_test[:0],
    )


def _agreed(settings: Settings) -> Settings:
    """What a server says; where a site's data lie is not the server's to say."""
    return {name: value for name, value in settings.items() if name.replace("-", "_") != "data_root"}


def _own(node: Settings) -> Settings:
    """What a site sets for itself: where its data are, and perhaps under which name."""
    return {name: node[name] for name in ("data", "data-root") if name in node}


def _client(node: Settings, config: Config) -> int:
    client = node.get("client")
    if type(client) is not int or not 0 <= client < config.clients:
        raise FedAlloyError(
            f"--node-config client={client} names no client; they run from 0 to {config.clients - 1}"
        )
    return client


def _refuse_the_hub(config: Config, node: Settings) -> None:
    """A server may name a file in this site's own folder, never what is fetched or lies elsewhere."""
    if "data" not in node and "hf:" in config.data:
        raise FedAlloyError(
            f"this site reads only its own folder, not {config.data}; its operator may name that with --data"
        )


@lru_cache(maxsize=4)
def _desk(settings: str, node: str) -> Desk:
    return Desk(json.loads(settings), json.loads(node))


def answer(message: Message, context: Context) -> Message:
    """Flower's message in, Flower's message out: by the one way that there is."""
    node = dict(context.node_config)

    def work() -> tuple[Message, float | None]:
        desk = _desk(json.dumps(dict(context.run_config)), json.dumps(node))
        return greet_or_answer(desk, message, context), desk.spent(message)

    state = Path(str(node.get("state", "fedalloy-state"))).expanduser()
    return leave(message, Audit(state), work, str(node.get("superlink", "")))


def greet_or_answer(desk: Desk, message: Message, context: Context | None = None) -> Message:
    """A hello for a hello, a reply for a mail."""
    if message.metadata.message_type == "query" and HELLO in message.content:
        told = message.content[HELLO].get("preprocessing", "")
        return Message(RecordDict({FACTS: ConfigRecord({**desk.hello(str(told))})}), reply_to=message)
    return desk.answer(message, context)
