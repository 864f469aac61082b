"""One row per method; every contract test is generated from these rows.

To put a method of your own under the contract, add a row with its expression, such as
`Row("my_package.my_module:my_method(mu=1)", private=True)`.
"""

from dataclasses import dataclass

from fedalloy.expression import parse

PLAIN = "mlp(hidden=8)"
NORMED = "mlp(hidden=8, norm=batch)"
CONVOLUTIONS = "cnn-fedrda"


@dataclass(frozen=True)
class Row:
    """A method with small settings, chosen so that everything it does matters within three rounds."""

    method: str
    private: bool = False  # whether clients keep state of their own
    silent: bool = False  # whether that state only serves the client's own predictions, never its training
    indispensable: bool = False  # whether a client that lost that state cannot go on
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
    Row("feddw(mu=10)", zero=("feddw(mu=0)", "fedavg+headwithoutbias")),
    Row("balancedsoftmax", zero=("balancedsoftmax(tau_prior=0)", "fedavg")),
    Row("fedetf"),
    Row("feddecorr(beta=1)", zero=("feddecorr(beta=0)", "fedavg")),
    Row("fedblade", models=(NORMED,), zero=("fedblade(beta=0, gamma=0)", "fedetf")),
    Row("fedrda(alpha=1, gamma=1)", zero=("fedrda(alpha=0, gamma=0)", "fedavg+compacthead(alpha=0)")),
    Row("fedsce(p=1, mu=0.1)", private=True),
    Row("ssf(ratio=0.5)", private=True, indispensable=True),
    Row("fedsub(ratio=0.5, projector=haar)", private=True, indispensable=True),
    Row("fedsol", zero=("fedsol(rho=0)", "fedavg")),
    Row("fedfa(calib_lr=0.1)", zero=("fedfa(lam=0, calibration=none)", "fedavg")),
    Row("ccvr(samples=20, head_epochs=2)", zero=("ccvr(samples=0)", "fedavg")),
    Row("fedfaaug", models=(CONVOLUTIONS,), zero=("fedfaaug(prob=0)", "fedavg")),
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
    Row("moon(proj_dim=8)+dw(mu=10)", private=True, models=(PLAIN,)),
    Row("feddw(mu=10, sl_momentum=0.5, mu_decay=10, mu_decay_every=2)", models=(PLAIN,)),
    Row("fedblade(decorr=feddecorr, no_fa=True, no_df=True, absent_count=0)", models=(NORMED,)),
    Row("fedrda(encoder=autoencoder, decomposition=pca, depth=2, main_loss=False)", models=(NORMED,)),
    Row("fedrda(encoder=orthogonal, decomposition=qr, scores=logits)", models=(PLAIN,)),
    Row("fedsce(p=1, contribution=False, adaptive=False)", private=True, models=(PLAIN,)),
    Row("fedavg+subspace(ratio=0.5)", models=(NORMED,)),
    Row("feddyn(alpha=0.1)+virtualfeatures(cov='diag', relu_clip=True)", private=True, models=(NORMED,)),
    Row("fedfa(calibration=epoch, calib_lr=0.1, official_mean=True, class_weighted=True)", models=(PLAIN,)),
    Row("ssf(ratio=0.3, scope=whole, refresh=2)", private=True, indispensable=True, models=(PLAIN,)),
)
