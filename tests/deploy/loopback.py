"""Flower's grid without Flower's processes: messages take their serialised form and go straight to the sites."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedalloy.deploy.audit import Audit
from fedalloy.deploy.door import leave
from fedalloy.deploy.site import Desk, greet_or_answer

SMALL: dict[str, Any] = {  # three sites, each with its share of the digits, and a tiny net
    "method": "scaffold",
    "clients": 3,
    "model": "mlp(hidden=4)",
    "rounds": 3,
    "batch": 256,
    "skew": "pathological:5",
    "sites": "dealt",
}
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # no message can be made without
Tamper = Callable[[Message, Message], Message]  # the question, the answer: another answer


class Loopback(Grid):
    """One node for each client, number 100 + client."""

    def __init__(self, settings: dict[str, Any], state: Path, nodes: Sequence[dict[str, Any]]) -> None:
        self.desks = {
            100 + place: Desk(settings, {"client": place, "state": str(state), **node})
            for place, node in enumerate(nodes)
        }
        self.contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in self.desks}
        self.present = set(self.desks)
        self.tamper: Tamper = lambda question, answer: answer
        self.deaf: Callable[[Message], bool] = lambda question: False  # nobody ever answers these
        self.waiting: dict[str, Message] = {}
        self.sent = 0
        self.left: list[tuple[int, Message]] = []  # all that went out, by node

    def set_run(self, run: Run) -> None: ...

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def get_node_ids(self) -> Iterable[int]:
        return sorted(self.present)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            self.sent += 1
            message.metadata.__dict__["_message_id"] = f"message-{self.sent}"
            self.waiting[f"message-{self.sent}"] = message
            names.append(f"message-{self.sent}")
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = []
        for name in message_ids:
            node = self.waiting[name].metadata.dst_node_id
            if node not in self.present or self.deaf(self.waiting[name]):
                continue
            question = self.waiting.pop(name)
            answer = self.answer(node, travelled(question))
            self.left.append((node, travelled(answer)))
            found.append(travelled(self.tamper(question, answer)))
        return found

    def answer(self, node: int, question: Message) -> Message:
        """What leaves a site, as it would from a worker."""
        desk = self.desks[node]
        audit = Audit(desk.state / f"audit-{node}")

        def work() -> tuple[Message, float | None]:
            return greet_or_answer(desk, question, self.contexts[node]), desk.spent(question)

        return leave(question, audit, work, "loopback:1")


def travelled(message: Message) -> Message:
    """The message as it is after its way as bytes."""
    contents = {name: one.deflate() for name, one in get_all_nested_objects(message).items()}
    arrived = cast(Message, inflate_object_from_contents(message.object_id, contents))
    arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
    return arrived
