"""The two halves of a Flower app, for any method: what `fedalloy deploy init` points Flower at."""

import os

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

ALLOWED = "FEDALLOY_ALLOW_CODE"
LINK = "FEDALLOY_LINK"  # the process of the SuperLink

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    from fedalloy.core.imports import Imports
    from fedalloy.deploy.server import serve
    from fedalloy.engines.processes import end_after

    if link := os.environ.get(LINK):
        end_after(
            int(link)
        )  # a run without its SuperLink would try for ever to reach it, and keep its folder locked

    allowed = os.environ.get(ALLOWED) == "1"  # by the server's operator, never by what was sent to it
    serve(grid, dict(context.run_config), Imports() if allowed else None)


@client_app.train()
@client_app.evaluate()
@client_app.query()
def answer(message: Message, context: Context) -> Message:
    from fedalloy.deploy.site import answer

    return answer(message, context)
