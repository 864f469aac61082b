"""One row per method; every contract test is generated from these rows.

To put a method of your own under the contract, add a row with its expression, such as
`Row("my_package.my_module:my_method(mu=1)", private=True)`.
"""

from dataclasses import dataclass

from fedalloy.core.expression import parse

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
    Row("fedlc", zero=("fedlc(tau=0, absent=floor)", "fedavg")),
    Row("fedetf"),
    Row("feddecorr(beta=1)", zero=("feddecorr(beta=0)", "fedavg")),
    Row("fedblade", models=(NORMED,), zero=("fedblade(beta=0, gamma=0)", "fedetf")),
    Row("feduv", zero=("feduv(lambda_v=0, lambda_u=0)", "fedavg")),
    Row("fedfm(lam=5)", zero=("fedfm(lam=0)", "fedavg")),
    Row("fedrcl(kappa=0.1)", zero=("fedrcl(w_s=0, w_p=0, grad_clip=none)", "fedavg")),
    Row("fedrda(alpha=1, gamma=1)", zero=("fedrda(alpha=0, gamma=0)", "fedavg+compacthead(alpha=0)")),
    Row("fedsce(p=1, mu=0.1)", private=True),
    Row("ssf(ratio=0.5)", private=True, indispensable=True),
    Row("fedsub(ratio=0.5, projector=haar)", private=True, indispensable=True),
    Row("fedper", private=True, zero=("fedper(num_personal_layers=0)", "fedavg")),
    Row("fedrep", private=True),
    Row("fedbabu(ft_epochs=1)"),
    Row("ditto", private=True),
    Row("fedsol", zero=("fedsol(rho=0)", "fedavg")),
    Row("fedfa(calib_lr=0.1)", zero=("fedfa(lam=0, calibration=none)", "fedavg")),
    Row("ccvr(samples=20, head_epochs=2)", zero=("ccvr(samples=0)", "fedavg")),
    Row("fedfaaug", models=(CONVOLUTIONS,), zero=("fedfaaug(prob=0)", "fedavg")),
    Row("fedpac(head_lr=0.05)"),
    Row("fedala", private=True),
    Row(
        "perfedavg(alpha=0.1, beta=0.1)",
        zero=("perfedavg(alpha=0, beta=0.1, adapt_steps=0)", "fedavg"),
    ),
    Row(
        "fedproto(lam=5)",
        private=True,
        zero=("fedproto(lam=0, evaluate=head)", "local(participation_applies=True)"),
    ),
    Row("feddistill", private=True, zero=("feddistill(lam=0)", "local(participation_applies=True)")),
    Row("feddistillplus", zero=("feddistillplus(lam=0)", "fedavg")),
    Row("fml", private=True),
    Row("fedkd", private=True, indispensable=True),
    Row(
        "fedtgp(server_epochs=5)",
        private=True,
        zero=("fedtgp(lam=0, server_epochs=5, evaluate=head)", "local(participation_applies=True)"),
    ),
    Row("fedgh(server_epochs=5, server_lr=0.1)", private=True),
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
    Row("feduv+dw(mu=10)", models=(PLAIN,)),
    Row("fedrcl(kappa=0.1, form=full, agg_weights=uniform, grad_clip=0.5)", models=("cnn-bn",)),
    Row("fedrcl(levels=(0, 2), topk_pos=2, topk_neg=1)+contrast", private=True, models=("cnn-bn",)),
    Row("fedfm(lam=20, matching=l2, one_trip=True, equal_avg=True)", models=(NORMED,)),
    Row("scaffold+matching(lam=5, equal_avg=True)", private=True, models=(PLAIN,)),
    Row("fedfm(lam=5)+virtualfeatures(samples=20)", models=(PLAIN,)),
    Row("fedlc(tau=1, form=pairwise, absent=floor)", models=(NORMED,)),
    Row("feddw(mu=10, sl_momentum=0.5, mu_decay=10, mu_decay_every=2)", models=(PLAIN,)),
    Row("fedblade(decorr=feddecorr, no_fa=True, no_df=True, absent_count=0)", models=(NORMED,)),
    Row("fedrda(encoder=autoencoder, decomposition=pca, depth=2, main_loss=False)", models=(NORMED,)),
    Row("fedrda(encoder=orthogonal, decomposition=qr, scores=logits, kappa=free)", models=(PLAIN,)),
    Row("fedsce(p=1, contribution=False, adaptive=False)", private=True, models=(PLAIN,)),
    Row("fedavg+subspace(ratio=0.5)", models=(NORMED,)),
    Row("feddyn(alpha=0.1)+virtualfeatures(cov='diag', relu_clip=True)", private=True, models=(NORMED,)),
    Row("fedfa(calibration=epoch, calib_lr=0.1, official_mean=True, class_weighted=True)", models=(PLAIN,)),
    Row("ssf(ratio=0.5, agg_weights=size)", private=True, indispensable=True, models=(NORMED,)),
    Row("ssf(ratio=0.3, scope=whole, refresh=2)", private=True, indispensable=True, models=(PLAIN,)),
    Row("fedper(num_personal_layers=2, eval_body=own)", private=True, models=(NORMED,)),
    Row("fedrep(eval_body=own, ft_epochs=1, freeze_bn=True, head_lr=0.2)", private=True, models=(NORMED,)),
    Row("fedbabu(ft_epochs=0, head_init=orthogonal, agg_weights=uniform)", models=(NORMED,)),
    Row("ditto(lam_candidates=(0.1, 1, 2), personal_epochs=1)", private=True, models=(NORMED,)),
    Row("scaffold+personalmodel(lam=0.1, lr=0.05)", private=True, models=(PLAIN,)),
    Row(
        "perfedavg(alpha=0.1, beta=0.1, variant=hf, inner_batch=same, agg_weights=uniform)", models=(NORMED,)
    ),
    Row("perfedavg(alpha=0.1, beta=0.1, variant=exact, adapt_steps=0)", models=(PLAIN,)),
    Row(
        "fedala(num_ala_layers=0, start_until_converged=False, ala_all=True)", private=True, models=(NORMED,)
    ),
    Row("fedproto(lam=5, weighted=True, proto_pass=train, evaluate=head)", private=True, models=(NORMED,)),
    Row("fedproto(feature_dim=4)", private=True, models=(PLAIN,)),
    Row("fedkd(compress=False, hidden=False, student_lr=0.05, clip=1)", private=True, models=(NORMED,)),
    Row("fedavg+svd(t_start=0.5)", models=(NORMED,)),
    Row("fedtgp(server_epochs=5, tau=1, server_lr=0.1, evaluate=head)", private=True, models=(NORMED,)),
    Row("fedgh(server_epochs=5, server_batch=8, evaluate=trained)", private=True, models=(NORMED,)),
    Row("fml(agg_weights=size, detach=False, kl=mean, clip=1)", private=True, models=(NORMED,)),
    Row("feddistill(leave_one_out=True)", private=True, models=(NORMED,)),
    Row("feddistill(output=prob, leave_one_out=True)", private=True, models=(PLAIN,)),
    Row("feddistillplus(sl_momentum=0.5)+dw(mu=10, sl_momentum=0.5)", models=(PLAIN,)),
    Row("fedala(num_ala_layers=0, rand_percent=100, ala_all=True)", private=True, models=(NORMED,)),
    Row("perfedavg(alpha=0.1, beta=0.1, variant=hf, inner_batch=same)", models=(NORMED,)),
    Row("perfedavg(variant=exact, beta=0.1, adapt_steps=0, agg_weights=uniform)", models=(PLAIN,)),
    Row("fedpac(lam=0, head_epochs=2)", models=(PLAIN,)),
    Row("fedpac(lam=2, combine=False)", private=True, models=(NORMED,)),
    Row("fedavg+private(clip=0.5, noise=0.02)", models=(PLAIN,)),
    Row("scaffold+private(clip=2, noise=0.05, where='server', amplify=True)", private=True, models=(PLAIN,)),
    Row("ssf(ratio=0.5)+private(clip=2, noise=0.02)", private=True, indispensable=True, models=(PLAIN,)),
)
