"""What Flower leaves open between sites that are let in: each speaks for itself, and fetches what was made for it.

Flower checks who calls. It checks neither in whose name the messages inside speak, nor for whom an object is that
somebody knows the hash of.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from flwr.proto.fleet_pb2 import (
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.superlink.servicer.fleet import fleet_handlers

LAST = 8  # messages of a node whose objects it may still fetch; it takes one after the other

Handler = Callable[..., Any]


class Bound:
    """Flower's handlers of Fleet calls, each for the node that calls alone."""

    def __init__(self, handlers: dict[str, Handler]) -> None:
        self.handlers = handlers
        self._made_for: dict[int, deque[frozenset[str]]] = {}  # by node: the objects of its last messages

    def pull_messages(self, request: PullMessagesRequest, **rest: Any) -> PullMessagesResponse:
        found: PullMessagesResponse = self.handlers["pull_messages"](request=request, **rest)
        mine = self._made_for.setdefault(request.node.node_id, deque(maxlen=LAST))
        mine.extend(frozenset(_objects(tree)) for tree in found.message_object_trees)
        return found

    def push_messages(self, request: PushMessagesRequest, **rest: Any) -> PushMessagesResponse:
        sender = request.node.node_id
        if any(message.metadata.src_node_id != sender for message in request.messages_list):
            raise FlowerError(ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED, f"{sender} speaks as another node")
        found: PushMessagesResponse = self.handlers["push_messages"](request=request, **rest)
        return found

    def pull_object(self, request: PullObjectRequest, **rest: Any) -> Any:
        self._check(request.node.node_id, request.object_id)
        return self.handlers["pull_object"](request=request, **rest)

    def confirm_message_received(self, request: ConfirmMessageReceivedRequest, **rest: Any) -> Any:
        self._check(request.node.node_id, request.message_object_id)
        return self.handlers["confirm_message_received"](request=request, **rest)

    def _check(self, node: int, name: str) -> None:
        if not any(name in one for one in self._made_for.get(node, ())):
            raise FlowerError(
                ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED, f"{node} asks for what is not for it"
            )


def _objects(tree: ObjectTree) -> list[str]:
    return [tree.object_id, *(name for child in tree.children for name in _objects(child))]


def bind_calls() -> None:
    """Put these in the place of Flower's."""
    found = vars(fleet_handlers)
    bound = Bound(dict(found))
    for name in ("pull_messages", "push_messages", "pull_object", "confirm_message_received"):
        found[name] = getattr(bound, name)
