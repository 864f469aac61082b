"""A site's long-lived worker. Flower would start a process for every message, and torch would be imported in each.

A SuperNode in process isolation leaves its messages to whoever asks its local address with the right secret: here a
process that has torch, the data and the nets at hand. It runs FedAlloy as installed there, no code of the server's.
"""

import logging
import threading
import time
from collections.abc import Callable

import httpx
from flwr.app import Context, Message
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedalloy.deploy.audit import AuditError
from fedalloy.engines.processes import keep_memory

PAUSE = 0.1  # seconds between two looks for a message
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"

Answer = Callable[[Message, Context], Message]

log = logging.getLogger("fedalloy")


def work(address: str, secret: bytes, answer: Answer, alive: Callable[[], bool]) -> None:
    """Answer the messages of the SuperNode at a local address as long as it is alive."""
    keep_memory()
    signer = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={ACQUIRE})
    client = _client(address, signer)
    turn = threading.Lock()
    broken: list[AuditError] = []  # why nothing may leave any more

    def in_turn(message: Message, context: Context) -> Message:
        with turn:
            try:
                return answer(message, context)
            except AuditError as error:
                broken.append(error)
                raise

    while alive():
        if broken:
            raise broken[0]
        try:
            found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        except httpx.HTTPError as error:  # it is not up yet, or going down
            log.debug("no SuperNode at %s: %s", address, error)
            time.sleep(PAUSE)
            continue
        if (
            found.HasField("task") and found.token
        ):  # one that never comes complete must not keep others waiting
            threading.Thread(target=_handle, args=(address, found.token, in_turn), daemon=True).start()
        else:
            time.sleep(PAUSE)
    client.close()


def _handle(address: str, token: str, answer: Answer) -> None:
    """One message: pulled, answered, its answer pushed; what is told of it besides is always the same."""
    client = _client(address, RuntimeTokenHttpInterceptor(token))
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    context, status, details = None, SubStatus.FAILED, "the message could not be fetched"
    try:
        message, context, _, _ = pull_task_input(client)
        details = "the message could not be answered"
        reply = answer(message, context)
        push_message(client, reply, context)
        status, details = SubStatus.COMPLETED, ""
    except Exception:
        log.exception("a message was lost")
    finally:
        push_task_output(client, context, status, details)
        heartbeat.stop()
        client.close()


def _client(address: str, *interceptors: ProtobufClientInterceptor) -> RuntimeHttpClient:
    return RuntimeHttpClient.from_server_address(
        address,
        insecure=True,  # it does not leave this machine
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), *interceptors],
    )
