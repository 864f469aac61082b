"""The page of instructions that goes with a deployment."""

from fedalloy.deploy.terms import Terms
from fedalloy.experiment.config import Config

PAGE = """\
# A FedAlloy federation: {method}, {clients} sites

| folder | what | who gets it |
|---|---|---|
| `app/` | the run: method, model, rounds, limits (`pyproject.toml`, section `tool.flwr.app.config`) | the server |
| `credentials/` | the server's certificate and key, and the authority's key | the server only |
| `sites/site-K/` | what site K needs to join: its key pair and the authority's certificate | site K only |
| `server/` | checkpoint, history and report of the run; what Flower remembers | made by the server |

## The server

    fedalloy deploy server .

## Each site, on its own machine, with its own data

    fedalloy deploy site site-0 --data-root DIR --check
    fedalloy deploy site site-0 --data-root DIR

`DIR` holds the site's data{data}.
{prepared}
The server is at {address}; `site-0/site.toml` says so. Private state stays in `--state`, by default `site-0/state`.

## Start, watch, stop

    fedalloy deploy run .
    fedalloy deploy status .
    fedalloy deploy stop .

A site's key is replaced with `fedalloy deploy key . site-0 --new`, and let out with `--remove`.

After a crash of anything, start it again with the same command. A run that was cut short carries on from its last
checkpoint with `fedalloy deploy run .`.
"""


def guide(config: Config, terms: Terms, address: str) -> str:
    """Instructions for exactly this federation."""
    if terms.sites == "dealt":
        data = f", the whole data set `{config.data}`: each site takes its share of it"
    else:
        data = (
            f" as `{config.data}.npz`, a folder `{config.data}/` of images by class, or `{config.data}.csv`"
        )
    if terms.sites == "dealt":
        prepared = "All sites have the same data set, and so the same mean and deviation."
    elif terms.computed:
        prepared = (
            "All sites scale their samples alike: before round 1 each sends how many numbers each channel or column\n"
            "has, their sum and the sum of their squares, and gets back one mean and deviation for all."
        )
    else:
        prepared = (
            "All sites scale their samples alike, by the mean and deviation or vocabulary given in the terms."
        )
    return PAGE.format(
        prepared=prepared, method=config.method, clients=config.clients, address=address, data=data
    )
