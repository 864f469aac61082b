"""One row per method; every contract test is generated from these rows.

To put a method of your own under the contract, add a row with its expression, such as
`Row("my_package.my_module:my_method(mu=1)", private=True)`.
"""

from dataclasses import dataclass

from fedalloy.expression import parse

PLAIN = "mlp(hidden=8)"
NORMED = "mlp(hidden=8, norm=batch)"


@dataclass(frozen=True)
class Row:
    """A method with small settings, chosen so that everything it does matters within three rounds."""

    method: str
    private: bool = False  # whether clients keep state of their own
    silent: bool = False  # whether that state only serves the client's own predictions, never its training
    models: tuple[str, ...] = (PLAIN, NORMED)
    zero: tuple[str, str] | None = (
        None  # with its hyper-parameter at 0, and the simpler method that this must be
    )

    @property
    def name(self) -> str:
        return self.method if ":" in self.method else parse(self.method)[0].name


ROWS = (
    Row("fedavg"),
    Row("fedprox(mu=0.1, straggler_fraction=0.5)", zero=("fedprox(mu=0)", "fedavg")),
    Row("scaffold", private=True),
    Row("fednova(mu=0.1, server_momentum=0.5)"),
    Row("feddyn(alpha=0.1)", private=True),
    Row("moon(mu=5, proj_dim=8)", private=True, zero=("moon(mu=0, proj_dim=8)", "fedavg+projector(width=8)")),
    Row("local", private=True),
)

# Paths through a method that its defaults do not take; one model is enough for these.
VARIANTS = (
    Row("fedavg(buffers=local)", private=True, silent=True, models=(NORMED,)),
    Row("fedavg(buffers=drop, agg_weights=uniform, server_lr=0.5)", models=(NORMED,)),
    Row("scaffold(c_update=mean_grad)", private=True, models=(NORMED,)),
    Row("scaffold(c_update=option1, agg_weights=size)", private=True, models=(NORMED,)),
    Row("scaffold(lean_upload=True)", private=True, models=(PLAIN,)),
    Row("fednova", models=(NORMED,)),
    Row("moon(mu=5, buffer_size=2, projection=penultimate)", private=True, models=(PLAIN,)),
    Row("local(participation_applies=True)", private=True, models=(PLAIN,)),
    Row("moon(proj_dim=8)+prox(mu=0.1)", private=True, models=(PLAIN,)),
    Row("share(part='body')", private=True, models=(NORMED,)),
    Row("scaffold+dynamic", private=True, models=(PLAIN,)),
)
