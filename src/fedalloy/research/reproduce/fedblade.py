"""FedBlade (seed paper, under review): Tables 1 to 17, Figures 2 to 10."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fedalloy.experiment.config import Config
from fedalloy.report.runs import Run, read_run
from fedalloy.research.reproduce.grid import (
    Column,
    Grid,
    Measure,
    Row,
    Settings,
    accuracy,
    diagnostic,
    numbers,
    place,
)

SEEDS = (1024, 2025, 4096)
BASE: dict[str, Any] = {
    "model": "mobilenetv2",
    "clients": 100,
    "participation": 0.2,
    "augment": "crop:4,flip",
    "rounds": 200,
    "epochs": 5,
    "batch": 64,
    "lr": 0.01,
    "momentum": 0.9,
    "weight_decay": 1e-5,
    "diagnose_every": 50,
}
ALPHAS = ("0.05", "0.1", "0.5")
SETS = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "Tiny": "tiny-imagenet"}

LESS: dict[str, Any] = {
    "data": "cifar10",
    "model": "cnn-bn",
    "clients": 20,
    "participation": 0.5,
    "limit": 8000,
    "rounds": 25,
    "epochs": 2,
    "diagnose_every": 5,
}
SHARED = (
    "CIFAR-10 stands for every data set, so that columns share their runs: where the paper has another, "
    "compare the order of methods"
)
SMALL = "a small BatchNorm net (128 features), 10 of 20 clients, 8,000 training images, 25 rounds of"
REDUCED = f"{SMALL} 2 epochs; {SHARED}"

METHODS = {
    "FedAvg": "fedavg",
    "FedProx": "fedprox(mu=0.01)",
    "FedLC": "fedlc(tau=10)",
    "FedDecorr": "feddecorr(beta=0.1)",
    "FedRCL": "fedrcl(tau=0.1)",
    "FedProto": "fedavg+fedproto(lam=1, weighted=true, evaluate=head)",
    "FedFM": "fedfm(lam=1, tau=0.1)",
    "FedETF": "fedetf",
    "FedBlade": "fedblade",
}
PARTS = {
    "neither (FedETF)": "fedetf",
    "LDDecorr only": "fedblade(pba=false)",
    "PBA only": "fedblade(decorr=none)",
    "both (FedBlade)": "fedblade",
}
COMPARED = (
    "FedProto is taken as a term of FedAvg: its numbers in the paper are those of one global model.",
    "FedRCL has τ = 0.1; the paper's weight β = 0.7 is read as the threshold κ of its authors' code.",
)
INFERRED = "What the paper shows here is inferred from its text; of its numbers none are known."

# Columns of three α for each of CIFAR-10, CIFAR-100 and Tiny-ImageNet.
TABLE1 = {
    "FedAvg": "55.19/69.26/86.12 50.70/55.52/60.40 33.72/37.68/41.59",
    "FedProx": "53.74/69.53/85.94 50.97/55.33/60.41 33.15/37.29/41.64",
    "FedLC": "75.10/80.71/86.71 51.12/55.35/60.30 37.09/40.12/42.42",
    "FedDecorr": "57.77/70.85/85.78 50.86/54.26/58.87 35.87/38.77/41.82",
    "FedRCL": "52.14/71.15/86.91 50.56/56.71/61.32 31.94/36.81/41.95",
    "FedProto": "55.05/69.35/85.96 50.95/55.81/60.64 31.31/36.47/42.45",
    "FedFM": "55.04/69.61/86.52 46.55/54.83/61.98 25.41/33.56/40.47",
    "FedETF": "75.80/80.66/86.56 51.41/55.31/58.81 37.09/40.03/41.96",
    "FedBlade": "75.83/81.67/87.90 54.31/57.92/62.07 39.43/41.88/43.63",
}
TABLE7 = {
    "FedAvg": "67.44/81.88/89.86 57.94/61.80/66.82 43.02/46.35/51.24",
    "FedProx": "70.21/82.99/89.62 57.48/61.87/66.35 42.13/45.35/50.01",
    "FedLC": "75.09/84.81/89.78 56.63/61.17/66.42 44.73/47.66/51.08",
    "FedDecorr": "73.55/84.07/89.35 56.56/60.59/65.09 44.34/46.63/50.96",
    "FedRCL": "61.25/76.67/89.85 53.07/60.37/67.10 38.17/42.86/48.88",
    "FedProto": "70.67/83.59/89.76 57.17/61.89/66.48 41.05/45.16/51.18",
    "FedFM": "66.15/82.85/90.20 52.36/62.47/67.63 37.72/42.85/48.65",
    "FedETF": "75.22/84.66/89.66 57.49/61.77/66.65 45.50/48.59/51.71",
    "FedBlade": "76.25/84.20/90.44 58.33/62.57/68.13 43.99/47.69/51.99",
}
TABLE8 = {
    "FedAvg": "62.09/73.78/88.69 57.08/60.81/63.44 39.70/43.29/46.29",
    "FedProx": "62.76/74.68/88.65 56.97/60.79/63.19 39.84/43.45/46.38",
    "FedLC": "79.83/84.68/89.20 56.62/58.77/61.93 42.65/45.66/47.37",
    "FedDecorr": "67.05/76.53/88.74 54.72/57.40/58.14 40.17/42.92/44.83",
    "FedRCL": "63.83/71.07/86.84 52.42/58.70/63.49 37.00/41.61/45.53",
    "FedProto": "61.58/74.41/89.16 56.18/59.69/64.27 39.43/43.53/47.82",
    "FedFM": "63.79/75.48/88.88 55.43/61.42/67.40 34.12/41.54/48.08",
    "FedETF": "80.41/85.08/89.36 57.61/60.09/60.92 42.79/45.41/47.08",
    "FedBlade": "81.41/85.66/90.25 60.56/63.94/65.55 43.43/45.84/47.94",
}
# Rounds to both targets, for three α on CIFAR-100 and three on Tiny-ImageNet.
SPEED = {
    "FedAvg": "85/184 60/117 43/76 70/141 46/104 37/75",
    "FedProx": "88/180 60/117 43/77 70/150 51/104 37/77",
    "FedLC": "68/174 56/110 41/75 49/102 40/81 35/71",
    "FedDecorr": "68/176 53/111 40/79 45/101 37/79 30/60",
    "FedRCL": "77/180 53/101 40/70 88/166 63/121 46/82",
    "FedProto": "85/175 60/111 41/71 82/170 57/114 39/76",
    "FedFM": "122/200+ 71/131 41/70 130/200+ 74/157 43/89",
    "FedETF": "74/151 57/111 53/83 60/116 50/92 46/79",
    "FedBlade": "48/105 40/78 34/58 41/81 37/67 39/66",
}
TARGETS = {"cifar100": (0.4, 0.5), "tiny-imagenet": (0.2, 0.3), "cifar10": (0.2, 0.3)}

LAST10 = accuracy(last=10)
RANK_Z = diagnostic("effective rank of z", "effective rank of features (covariance)", digits=1)
RANK_Z_CORRELATION = diagnostic(
    "effective rank of z (correlation)", "effective rank of features (correlation)", digits=1
)
RANK_OUT = diagnostic("effective rank (covariance)", "effective rank of embedding (covariance)", digits=2)
RANK_OUT_CORRELATION = diagnostic(
    "effective rank (correlation)", "effective rank of embedding (correlation)", digits=2
)
NC1 = diagnostic("NC1", "nc1n", smaller=True, digits=4)
NC2 = diagnostic("NC2", "nc2", smaller=True, digits=2)
NC_OTHER = [
    diagnostic("tr(S_W S_B⁺)/C", "nc1", smaller=True),
    diagnostic("tr S_W / tr S_B", "nc1r", smaller=True),
    diagnostic("NC2, unit Grams", "nc2n", smaller=True),
]


def _padded(text: str, shown: int, measures: int) -> list[float | None]:
    """The paper's numbers, so many for each column, where other measures stand beside them."""
    found, gap = numbers(text), [None] * (measures - shown)
    return [one for i in range(0, len(found), shown) for one in (*found[i : i + shown], *gap)]


def _rows(methods: Mapping[str, str], paper: Mapping[str, str] | None = None) -> list[Row]:
    return [Row(label, method, numbers((paper or {}).get(label, ""))) for label, method in methods.items()]


def _columns(*sets: str, alphas: Sequence[str] = ALPHAS) -> list[Column]:
    return [
        Column(f"{name} α={alpha}", {"data": SETS[name], "skew": f"dirichlet:{alpha}"})
        for name in sets
        for alpha in alphas
    ]


ALL_SETS = _columns(*SETS)
CIFAR100, TINY = _columns("CIFAR-100"), _columns("Tiny")
TWO_SETS = [*CIFAR100, *TINY]


def _target(which: Literal[0, 1]) -> Measure:
    """The first round at or above a target of the data set."""

    def of(run: Run) -> float | None:
        target = TARGETS[run.config["data"]][which]
        return next((float(n) for n, value in run.curve("global_acc").items() if value >= target), None)

    return Measure(f"rounds to the {('lower', 'higher')[which]} target", of, smaller=True, digits=0)


def _accuracy(
    says: str, paper: Mapping[str, str], settings: Settings, cpu: Settings, reduced: str = REDUCED
) -> Grid:
    """All methods on all data sets."""
    return Grid(
        says,
        _rows(METHODS, paper),
        ALL_SETS,
        [LAST10],
        {**BASE, **settings},
        {**LESS, **cpu},
        reduced,
        SEEDS,
        notes=("Mean over the last ten rounds.", *COMPARED),
    )


def _speed(says: str, columns: Sequence[Column], note: str) -> Grid:
    """Rounds to both targets in some of the columns of two data sets."""
    first = 2 * TWO_SETS.index(columns[0])
    rows = [
        Row(name, method, numbers(SPEED[name])[first : first + 2 * len(columns)])
        for name, method in METHODS.items()
    ]
    targets = "Targets: 40 and 50 % on CIFAR-100, 20 and 30 % on Tiny-ImageNet; at cpu scale 20 and 30 %."
    return Grid(
        says,
        rows,
        columns,
        [_target(0), _target(1)],
        BASE,
        LESS,
        REDUCED,
        SEEDS,
        notes=(targets, "A dash is a target that was not reached (200+ in the paper).", note, *COMPARED),
    )


def _study(
    says: str, rows: Sequence[Row], measures: Sequence[Measure], *notes: str,
    columns: Sequence[Column] = CIFAR100, drawn: Sequence[Literal["curves", "sweep", "inside"]] = ("curves",),
) -> Grid:  # fmt: skip
    """A smaller question in the setting of Table 1."""
    return Grid(says, rows, columns, measures, BASE, LESS, REDUCED, SEEDS, drawn, notes)


def _sweep(figure: int, name: str, sign: str, values: Sequence[float], default: float) -> Grid:
    """FedBlade over the values of one hyper-parameter; the default is the run of Table 1."""
    skews = [
        Row(f"CIFAR-100 α={alpha}", "fedblade{options}", settings={"skew": f"dirichlet:{alpha}"})
        for alpha in ALPHAS
    ]
    columns = [
        Column(
            f"{sign}={value}",
            {"data": "cifar100"},
            fill={"options": "" if value == default else f"({name}={value})"},
        )
        for value in values
    ]
    return _study(
        f"FedBlade Figure {figure}: sensitivity to {sign}",
        skews,
        [LAST10, RANK_Z],
        f"The range of {sign} is the paper's; that this figure shows it, and on CIFAR-100, is inferred.",
        columns=columns,
        drawn=("sweep",),
    )


# Table 10: a step costs the same wherever it is taken, so few are, one client after the other.
STEPS: dict[str, Any] = {
    "clients": 2,
    "participation": 1.0,
    "skew": "iid",
    "limit": 1600,
    "validation": 0.2,
    "rounds": 15,
    "steps": 10,
    "engine": "inline",
    "diagnose_every": None,
}
SILENT = "fedblade(decorr=none, gamma=0)"  # prototypes are taken, and nothing is done with them
WITHOUT = {
    "fedblade(pba=false)": "fedetf",
    "fedblade(decorr=none, no_pa=true)": SILENT,
    "fedblade(decorr=none, no_fa=true)": SILENT,
}


def _step(run: Run) -> float | None:
    """Milliseconds of a training step in the fastest round; the first, which has no prototypes, is left out."""
    found = [entry.seconds["train"] for entry in run.history[1:] if "train" in entry.seconds]
    return 1000 * min(found) / (run.config["clients"] * run.config["steps"]) if found else None


def _term(run: Run) -> float | None:
    """What a term adds to the step of the same run without it."""
    other = WITHOUT.get(run.config["method"])
    if other is None:
        return None
    folder = run.folder.parent / place(Config.of({**run.config, "method": other}))
    if not (folder / "summary.json").exists():
        return None
    mine, its = _step(run), _step(read_run(folder))
    return None if mine is None or its is None else mine - its


def _prototypes(way: Literal["up", "down"]) -> Measure:
    """What prototypes add to the traffic of one client in one round, in KB of 1024 bytes."""

    def of(run: Run) -> float | None:
        if not run.history:
            return None
        sent = run.history[-1].bytes_up if way == "up" else run.history[-1].bytes_down
        return sent["features-means.means"] / float(run.config["clients"]) / 1024

    return Measure(f"{way}load per client and round (KiB)", of, smaller=True, digits=1)


def _per_class(run: Run) -> float | None:
    down = _prototypes("down").of(run)
    return None if down is None or run.partition is None else down / len(run.partition.counts[0])


ITEMS: dict[str, Grid] = {
    "table1": _accuracy(
        "FedBlade Table 1: accuracy with MobileNetV2, 20 of 100 clients",
        TABLE1,
        {},
        {},
    ),
    "table2": _speed(
        "FedBlade Table 2: rounds to target accuracies",
        TWO_SETS,
        "Which of the numbers of Tables 12 to 17 the paper repeats here is not known: all are here. "
        "Its speed-up is FedAvg's number over a row's.",
    ),
    "table3": _study(
        "FedBlade Table 3: the two parts, alone and together",
        [
            Row(label, PARTS[label], _padded(printed, 1, 2))
            for label, printed in {
                "neither (FedETF)": "51.41/55.31/58.81 37.09/40.03/41.96",
                "LDDecorr only": "50.98/53.74/56.24 39.20/40.46/37.43",
                "PBA only": "52.66/56.42/61.60 36.05/39.55/41.82",
                "both (FedBlade)": "54.31/57.92/62.07 39.43/41.88/43.63",
            }.items()
        ],
        [LAST10, RANK_Z],
        "The paper's tick marks are lost: which row is LDDecorr alone is inferred from their order. "
        "The effective ranks (of the covariance of z) are ours to add.",
        columns=TWO_SETS,
    ),
    "table4": _study(
        "FedBlade Table 4: the alignment without one of its pieces",
        [
            Row("without FA", "fedblade(no_fa=true)", numbers("39.36/41.19/42.11")),
            Row("without DF", "fedblade(no_df=true)", numbers("36.61/39.95/43.40")),
            Row("without PA", "fedblade(no_pa=true)", numbers("38.68/40.48/42.50")),
            Row("FedBlade", "fedblade", numbers("39.43/41.88/43.63")),
        ],
        [LAST10],
        "FA aligns features, PA prototypes; DF is the label prior in FA's softmax, which stays in L_sup.",
        columns=TINY,
    ),
    "table5": _study(
        "FedBlade Table 5: neural collapse with and without the alignment",
        [
            Row(label, PARTS[part], _padded(printed, 2, 5))
            for label, part, printed in (
                ("without PBA", "LDDecorr only", "0.6425/22.33 0.6367/21.42 0.6260/20.83"),
                ("with PBA", "both (FedBlade)", "0.5669/18.53 0.5268/17.06 0.4762/16.37"),
            )
        ],
        [NC1, NC2, *NC_OTHER],
        "The paper prints no formulas. NC1 here is the mean squared distance of unit-norm z to their class mean, NC2 "
        "the Frobenius distance of the Gram matrix of centred unit-norm class means to that of a simplex ETF.",
    ),
    "table6": _study(
        "FedBlade Table 6: the methods with their hyper-parameters",
        [Row(f"{label}: {METHODS[label]}", METHODS[label]) for label in METHODS],
        [LAST10],
        "What the paper prints here is not known; hyper-parameters are inferred, as it states them, with what they "
        "give in the runs of Table 1.",
        *COMPARED,
        columns=_columns("CIFAR-10", alphas=["0.1"]),
    ),
    "table7": _accuracy(
        "FedBlade Table 7: accuracy with full participation, 20 of 20 clients",
        TABLE7,
        {"clients": 20, "participation": 1.0, "rounds": 100},
        {"clients": 10, "participation": 1.0, "limit": 4000, "rounds": 15},
        "a small BatchNorm net (128 features), 10 of 10 clients, 4,000 training images, 15 rounds of 2 epochs; "
        f"{SHARED}",
    ),
    "table8": _accuracy(
        "FedBlade Table 8: accuracy with ResNet-18, 20 of 100 clients",
        TABLE8,
        {"model": "resnet18"},
        {
            "model": "resnet18(width=0.125)",
            "clients": 10,
            "limit": 3000,
            "rounds": 12,
            "eval_every": 4,
            "diagnose_every": 12,
        },
        "ResNet-18 of an eighth of the width (64 features), 5 of 10 clients, 3,000 training images, 12 rounds of 2 "
        f"epochs, evaluated after every fourth; {SHARED}",
    ),
    "table9": Grid(
        "FedBlade Table 9: local epochs E",
        rows=[
            Row(f"E={epochs}", "fedblade", numbers(printed), {"epochs": epochs}, {"epochs": fewer})
            for epochs, fewer, printed in (
                (1, 1, "58.33/64.64/71.33 31.90/31.73/33.04 19.03/18.73/18.25"),
                (5, 2, TABLE1["FedBlade"]),
                (10, 4, "77.90/82.63/88.65 54.54/58.30/61.54 40.98/43.22/44.40"),
            )
        ],
        columns=ALL_SETS,
        measures=[LAST10],
        base=BASE,
        cpu=LESS,
        reduced=f"{SMALL} 1, 2 and 4 epochs for E = 1, 5 and 10; {SHARED}",
        seeds=SEEDS,
    ),
    "table10": Grid(
        "FedBlade Table 10: milliseconds of a step for each term of the loss",
        rows=[
            Row("L_sup (FedETF)", "fedetf", (None, 0.093, None, 0.091)),
            Row("L_LD", "fedblade(pba=false)", (None, 1.160, None, 0.559)),
            Row("prototypes, no term", SILENT),
            Row("L_FA", "fedblade(decorr=none, no_pa=true)", (None, 0.257, None, 0.161)),
            Row("L_PA", "fedblade(decorr=none, no_fa=true)", (None, 0.137, None, 0.130)),
        ],
        columns=[
            Column("MobileNetV2", {"model": "mobilenetv2"}, {"model": "mlp(hidden=1280, norm=batch)"}),
            Column("ResNet-18", {"model": "resnet18"}, {"model": "mlp(hidden=512, norm=batch)"}),
        ],
        measures=[
            Measure("whole step", _step, smaller=True),
            Measure("term", _term, smaller=True, digits=3),
        ],
        base=BASE | STEPS | {"data": "cifar100"},
        cpu={"data": "mnist", "augment": "none"},
        reduced="MNIST with perceptrons of 1280 and 512 features, for a term sees nothing of the net but its features; "
        "10 classes in place of 100",
        seeds=SEEDS,
        drawn=(),
        notes=(
            "The paper times each term by itself on an RTX 4090. Here a term is what a whole step takes beyond one "
            "without it, on the machine at hand: L_LD beyond FedETF, L_FA and L_PA beyond a run that takes prototypes "
            "and does nothing with them; the fastest round counts. L_sup cannot be taken away, so there is no number "
            "for it. On a busy machine or with --jobs above 1 the differences are noise.",
        ),
    ),
    "table11": Grid(
        "FedBlade Table 11: traffic of prototypes, one client and round",
        rows=[
            Row(label, "fedblade", numbers(printed), {"model": model})
            for label, model, printed in (
                ("MobileNetV2", "mobilenetv2", "50/-/5 500/-/5 1000/-/5"),
                ("ResNet-18", "resnet18", "20/-/2 200/-/2 400/-/2"),
            )
        ],
        columns=[
            Column(f"C={classes}", {"data": data})
            for classes, data in ((10, "cifar10"), (100, "cifar100"), (200, "tiny-imagenet"))
        ],
        measures=[
            _prototypes("down"),
            _prototypes("up"),
            Measure("download per class (KiB)", _per_class, smaller=True),
        ],
        base=BASE | STEPS | {"rounds": 1, "steps": 1, "epochs": 1},
        cpu={"data": "cifar10", "limit": 100},
        reduced="CIFAR-10 stands for all three data sets: of 100 and 200 classes compare the download per class",
        seeds=SEEDS[:1],
        drawn=(),
        notes=(
            "The paper prints one direction; its KB per class are that over C. A client downloads every class and "
            "uploads those that it holds. Traffic does not depend on training, so one step is taken, on equal shares "
            "of few images.",
        ),
    ),
    "fig2": _study(
        "FedBlade Figure 2: spectra and effective ranks of features",
        _rows({name: METHODS[name] for name in ("FedAvg", "FedDecorr", "FedETF", "FedBlade")}),
        [RANK_Z, RANK_Z_CORRELATION, NC1, NC2],
        INFERRED,
        columns=_columns("CIFAR-100", alphas=["0.05", "0.5"]),
        drawn=("inside",),
    ),
    "fig3": _study(
        "FedBlade Figure 3: no decorrelation, FedDecorr's and the log-determinant",
        [
            Row("none", "fedblade(decorr=none)"),
            Row("FedDecorr", "fedblade(decorr=feddecorr, beta=0.1)"),
            Row("log-determinant", "fedblade"),
        ],
        [LAST10, RANK_Z, RANK_Z_CORRELATION],
        "The variants are the paper's; data set, measures and that all have the alignment are inferred. "
        "FedDecorr has its own β = 0.1.",
    ),
    "fig4": _study(
        "FedBlade Figure 4: effective rank of the projector's output",
        _rows(PARTS),
        [RANK_OUT_CORRELATION, RANK_OUT],
        "Space and correlation matrix are the paper's, rows and data set are inferred; its numbers are not known. "
        "The output has as many dimensions as there are classes, and unit norm.",
        drawn=("sweep",),
    ),
    **{
        f"fig{figure}": _study(
            f"FedBlade Figure {figure}: effective rank of z, {name}",
            _rows(METHODS),
            [RANK_Z, RANK_Z_CORRELATION],
            "That this is the rank of z is the paper's, rows and data set are inferred; its numbers are not known.",
            *COMPARED,
            columns=columns,
            drawn=("sweep",),
        )
        for figure, name, columns in ((5, "CIFAR-100", CIFAR100), (10, "Tiny-ImageNet", TINY))
    },
    "fig6": _sweep(6, "beta", "β", (0.001, 0.005, 0.01, 0.05), 0.005),
    "fig7": _sweep(7, "gamma", "γ", (0.1, 1, 2, 5), 1),
    "fig8": _sweep(8, "tau", "τ", (0.01, 0.05, 0.1, 0.5), 0.1),
    "fig9": _study(
        "FedBlade Figure 9: accuracy by round",
        _rows(METHODS, {name: " ".join(printed.split()[1:]) for name, printed in TABLE1.items()}),
        [LAST10],
        "That the figure shows curves is inferred; they are those of the runs of Table 1, whose numbers stand here.",
        *COMPARED,
        columns=TWO_SETS,
    ),
    **{
        f"table{number}": _speed(
            f"FedBlade Table {number}: rounds to target accuracies, {column.label}",
            [column],
            "The order of Tables 12 to 17 (CIFAR-100, then Tiny-ImageNet; rising α) is inferred.",
        )
        for number, column in enumerate(TWO_SETS, 12)
    },
}
