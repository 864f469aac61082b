"""The two halves of a Flower app, for any method: what `fedalloy deploy init` points Flower at."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    from fedalloy.flower.server import serve

    serve(grid, dict(context.run_config))


@client_app.train()
@client_app.evaluate()
@client_app.query()
def answer(message: Message, context: Context) -> Message:
    from fedalloy.flower.site import answer

    return answer(message, context)
