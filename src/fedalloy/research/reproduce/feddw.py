"""FedDW (Liu et al. 2024, arXiv 2412.04521): Tables I to IV, Figures 4 to 8."""

from statistics import StatisticsError, correlation, fmean
from typing import Any

from fedalloy.report.runs import Run
from fedalloy.research.reproduce.grid import Column, Grid, Measure, Row, accuracy, diagnostic, seconds

BASE: dict[str, Any] = {
    "clients": 10,
    "rounds": 50,
    "epochs": 5,
    "batch": 128,
    "optimizer": "adam",
    "lr": 0.001,
}
PRACTICAL: dict[str, Any] = {"skew": "dirichlet:0.5"}
PATHOLOGICAL: dict[str, Any] = {"skew": "dirichlet:0.1", "participation": 0.5}
MNIST: dict[str, Any] = {"data": "mnist", "model": "cnn-feddw"}
FASHION: dict[str, Any] = {"data": "fashion-mnist", "model": "cnn-feddw"}
CIFAR10: dict[str, Any] = {"data": "cifar10", "model": "cnn-feddw"}
UNITS = "units=(256, 128)"  # every net of the paper ends with these two layers
CIFAR100: dict[str, Any] = {"data": "cifar100", "model": f"resnet18({UNITS})"}
IMDB: dict[str, Any] = {"data": "imdb", "model": "bilstm", "batch": 512, "rounds": 10}
SETS = {"MNIST": MNIST, "CIFAR-10": CIFAR10, "CIFAR-100": CIFAR100, "IMDB": IMDB}

LESS: dict[str, Any] = {"limit": 3000, "rounds": 10, "epochs": 2, "eval_every": 2, "eval_clients": 5}
LESS_CIFAR100: dict[str, Any] = {**LESS, "data": "cifar10", "model": "cnn-bn", "limit": 1500}
LESS_IMDB: dict[str, Any] = {
    "model": "bilstm(embed=32, hidden=32)",
    "limit": 10_000,
    "epochs": 3,
    "batch": 64,
    "eval_clients": 5,
}
LESSER = {"CIFAR-100": LESS_CIFAR100, "IMDB": LESS_IMDB}
SMALLER = "3,000 training samples, 10 rounds of 2 epochs, 5 personal models are tried"
STAND_IN = (
    "for CIFAR-100 with ResNet-18 1,500 samples of CIFAR-10 with a small net with BatchNorm, so order compares and "
    "values do not"
)

TUNED = "μ is 0.1, on CIFAR-100 10: the paper tunes it on these and does not name it for MNIST and IMDB."
FLAT = "FedAvg is FedDW with μ = 0: FedAvg with a classifier without bias, which also records soft labels."

# Personal models are judged on everybody's data: "mean over clients of the global-test accuracy".
ON_GLOBAL = accuracy("", "personal_on_global_acc", "global_acc")

TABLE1 = [
    Row("FedAvg", "fedavg", (99.31, 63.44, 62.16, 83.33, 95.05, 48.36, 43.47, 71.09)),
    Row("MOON", "moon", (99.42, 64.33, 63.35, 81.14, 96.11, 54.01, 49.04, 80.28)),
    Row("FedBABU", "fedbabu(ft_epochs=0)", (99.51, 65.59, 63.49, 82.41, 96.78, 53.06, 50.12, 81.08)),
    Row("FedUV", "feduv", (99.52, 65.05, 63.35, 68.22, 96.65, 54.97, 44.09, 55.12)),
    Row("FedProx", "fedprox", (99.39, 64.74, 62.81, 73.12, 95.12, 51.39, 46.07, 66.84)),
    Row("FedRep", "fedrep", (96.88, 52.42, 39.03, 74.64, 67.23, 28.05, 23.46, 54.13)),
    Row("FedProto", "fedproto", (97.11, 45.52, 23.15, 70.69, 49.83, 27.64, 16.48, 53.85)),
    Row("FedALA", "fedala", (99.02, 48.39, 41.97, 74.14, 79.16, 32.58, 28.16, 61.46)),
    Row("Per-FedAvg", "perfedavg", (99.12, 64.23, 62.22, 79.76, 96.21, None, None, 63.45)),
    Row("FedPer", "fedper", (96.55, 48.78, 36.87, 50.87, 64.89, 30.38, 22.82, 53.08)),
    Row("Local", "local", (95.35, 42.38, 22.83, 63.18, 55.76, 25.75, 15.54, 51.11)),
    Row("FedDW", "feddw(mu={mu})", (99.52, 66.24, 63.53, 84.46, 96.66, 57.73, 50.21, 82.81)),
]
TABLE2: dict[str, tuple[float | None, ...]] = {
    "FedAvg": (56.07, 51.41, 65.72, 66.09, 50.41, 52.77),
    "MOON": (53.59, 49.59, 65.84, 65.76, 50.87, 52.98),
    "FedBABU": (56.12, 50.55, 66.89, 66.33, 52.08, 53.05),
    "FedUV": (56.81, None, 66.81, 67.01, 51.97, 53.13),
    "FedProx": (55.87, 51.19, 65.84, 66.19, 50.34, 50.52),
    "FedRep": (38.66, 34.68, 45.84, 45.19, 29.17, 41.66),
    "FedProto": (37.15, 34.57, 44.52, 45.04, 28.34, 30.43),
    "FedALA": (39.71, 35.87, 46.55, 47.54, 34.17, 32.64),
    "Per-FedAvg": (55.23, 51.10, 63.55, 64.53, 48.44, 49.11),
    "FedPer": (40.84, 36.78, 46.68, 47.74, 35.22, 35.89),
    "Local": (28.13, 28.13, 40.68, 41.02, 25.71, 27.94),
    "FedDW": (57.60, 51.73, 67.06, 67.21, 51.92, 53.71),
}
TIMED = ("FedAvg", "MOON", "FedBABU", "FedUV", "FedProx", "FedProto", "FedDW")
HOSTS = {
    "FedAvg": "fedavg",
    "FedProx": "fedprox",
    "MOON": "moon",
    "FedUV": "feduv",
    "FedDistill+": "feddistillplus",
}
SETTINGS = [
    Column(
        f"{name} {setting}", {**data, **skew}, LESSER.get(name, LESS), {"mu": 10 if data is CIFAR100 else 0.1}
    )
    for setting, skew in (("practical", PRACTICAL), ("pathological", PATHOLOGICAL))
    for name, data in SETS.items()
]
CIFAR = [place for place, column in enumerate(SETTINGS) if column.label.startswith("CIFAR")]


def of_cifar10(label: str, cpu: dict[str, Any], **settings: Any) -> Column:
    return Column(label, {**CIFAR10, **settings}, cpu, {"mu": 0.1})


def of_cifar100(label: str, model: str, small: str) -> Column:
    less = {"data": "cifar10", "model": small, "limit": 1000, "rounds": 6, "epochs": 1, "eval_every": 6}
    return Column(label, {"data": "cifar100", "model": model}, {**less, "eval_clients": 2}, {"mu": 10})


def with_term(host: str) -> str:
    return "feddw(mu=10)" if host == "fedavg" else f"{host}+dw(mu=10)"


def epoch_seconds() -> Measure:
    """Seconds that one client takes for one local epoch, where clients take turns."""
    whole = seconds()

    def of(run: Run) -> float | None:
        took, turns = (
            whole.of(run),
            run.config["clients"] * run.config["participation"] * run.config["epochs"],
        )
        return None if took is None else took / turns

    return Measure("s per local epoch", of, smaller=True, digits=4)


def share_and_norm() -> Measure:
    """Over the classes of a client: do those with more samples have longer weights (1) or shorter ones (-1)?"""

    def of(run: Run) -> float | None:
        found = []
        for said in run.diagnostics.clients.values() if run.diagnostics else ():
            shares, norms = said.get("class shares"), said.get("norms of class weights")
            if isinstance(shares, tuple) and isinstance(norms, tuple):
                try:
                    found.append(correlation(shares, norms))
                except StatisticsError:  # all shares are the same
                    continue
        return fmean(found) if found else None

    return Measure("correlation of share and norm", of, digits=3)


ITEMS: dict[str, Grid] = {
    "table1": Grid(
        "FedDW Table I: accuracy in the practical and the pathological setting",
        rows=TABLE1,
        columns=SETTINGS,
        measures=[ON_GLOBAL],
        base=BASE,
        reduced=f"{SMALLER}; {STAND_IN}; IMDB is 10,000 samples, 10 rounds of 3 epochs, batches of 64 and an LSTM of "
        "32 units",
        notes=(TUNED, "The paper has five seeds."),
    ),
    "table2": Grid(
        "FedDW Table II: more clients, other local epochs, other nets",
        rows=[Row(row.label, row.method, TABLE2[row.label]) for row in TABLE1],
        columns=[
            of_cifar10("N = 50", {"limit": 5000}, clients=50),
            of_cifar10("N = 100", {"limit": 5000}, clients=100),
            of_cifar10("25 rounds × 10", {"rounds": 5, "epochs": 4, "eval_every": 1}, rounds=25, epochs=10),
            of_cifar10("125 rounds × 2", {"rounds": 20, "epochs": 1, "eval_every": 4}, rounds=125, epochs=2),
            of_cifar100("ShuffleNet", f"shufflenet({UNITS})", f"shufflenet(width=0.5, {UNITS})"),
            of_cifar100("MobileNet", f"mobilenetv2({UNITS})", f"mobilenetv2(width=0.25, {UNITS})"),
        ],
        measures=[ON_GLOBAL],
        base={**BASE, **PRACTICAL},
        cpu=LESS,
        reduced=f"{SMALLER}, 5,000 for more clients, 5 × 4 and 20 × 1 for 25 × 10 and 125 × 2; "
        "ShuffleNet and MobileNet are of half and a quarter of the width, on 1,000 samples of CIFAR-10 in "
        "place of CIFAR-100, 6 rounds of 1 epoch, 2 personal models are tried",
        seeds=(0,),
        notes=(
            TUNED,
            "The paper has five seeds, and does not say which MobileNet: ours is V2.",
        ),
    ),
    "table3": Grid(
        "FedDW Table III: time of a local epoch",
        rows=[Row(row.label, row.method) for row in TABLE1 if row.label in TIMED],
        columns=[Column("CIFAR-100, ResNet-18", {**CIFAR100, **PRACTICAL}, fill={"mu": 10})],
        measures=[epoch_seconds()],
        base={**BASE, "rounds": 3, "eval_every": 3, "personal_on_global": False, "engine": "inline"},
        cpu={"data": "cifar10", "model": f"resnet18(width=0.25, {UNITS})", "limit": 1000, "epochs": 1},
        reduced="1,000 samples of CIFAR-10, ResNet-18 of a quarter of the width, 1 epoch",
        seeds=(0,),
        drawn=(),
        notes=(
            "Three rounds, one client after the other, mean over clients and rounds, on the machine at hand: play it "
            "with one job and nothing beside it.",
            "The paper's values and its list of seven methods are not in our copy; the methods are our choice. Its "
            "text says that FedDW takes 0.06 ms more than FedAvg.",
        ),
    ),
    "table4": Grid(
        "FedDW Table IV: other methods with and without its term",
        rows=[
            row
            for label, host in HOSTS.items()
            for row in (Row(label, host), Row(f"{label} + DW", with_term(host)))
        ],
        columns=[Column("CIFAR-100 pathological", {**CIFAR100, **PATHOLOGICAL})],
        measures=[ON_GLOBAL],
        base=BASE,
        cpu=LESS_CIFAR100,
        reduced=f"{SMALLER}; {STAND_IN}",
        notes=(
            "μ is 10. FedAvg + DW is FedDW. Hosts beside FedUV and FedDistill+ are our choice, and the paper's values "
            "are not in our copy; its text says that the term helps most hosts and leaves FedUV unchanged.",
        ),
    ),
    "fig4": Grid(
        "FedDW Figure 4: norms of class weights against class shares",
        rows=[Row("FedAvg", "feddw(mu=0)")],
        columns=[
            Column("MNIST", MNIST),
            Column("Fashion-MNIST", FASHION, {"data": "svhn"}),
            Column("CIFAR-10", CIFAR10),
        ],
        measures=[share_and_norm()],
        base={**BASE, **PRACTICAL, "rounds": 10},
        cpu=LESS,
        reduced=f"{SMALLER}; SVHN in place of Fashion-MNIST",
        drawn=("inside",),
        notes=(
            FLAT,
            "Ten clients after one more round of local training, and the mean of their correlations. Setting and "
            "rounds are our choice; the paper has 100 trials for each data set.",
        ),
    ),
    "fig5": Grid(
        "FedDW Figure 5: t-SNE of features",
        rows=[Row("FedAvg", "feddw(mu=0)"), Row("FedDW", "feddw(mu=0.1)")],
        columns=[Column("MNIST pathological", {**MNIST, **PATHOLOGICAL})],
        measures=[ON_GLOBAL],
        base=BASE,
        cpu=LESS,
        reduced=SMALLER,
        seeds=(0,),
        drawn=("inside",),
        notes=(
            FLAT,
            "The paper scales features and class weights to unit length and maps both; here features are mapped as "
            "they are, after one more local round. The setting is our choice.",
        ),
    ),
    "fig6": Grid(
        "FedDW Figure 6: the weight μ",
        rows=[
            Row(column.label, "feddw(mu={mu})", settings=column.settings, cpu=column.cpu)
            for column in (SETTINGS[place] for place in CIFAR)
        ],
        columns=[Column(f"μ = {mu}", fill={"mu": mu}) for mu in (0.01, 0.1, 1, 10, 100)],
        measures=[ON_GLOBAL],
        base=BASE,
        reduced=f"{SMALLER}; {STAND_IN}",
        drawn=("sweep",),
    ),
    "fig7": Grid(
        "FedDW Figure 7: accuracy by round",
        rows=[Row(row.label, row.method, [row.paper[place] for place in CIFAR]) for row in TABLE1],
        columns=[SETTINGS[place] for place in CIFAR],
        measures=[ON_GLOBAL],
        base=BASE,
        reduced=f"{SMALLER}; {STAND_IN}",
        notes=("The runs of Table I, which the paper's numbers are from.", TUNED),
    ),
    "fig8": Grid(
        "FedDW Figure 8: soft labels and class relations",
        rows=[
            Row("FedAvg, IID", "feddw(mu=0)", settings={"skew": "iid"}),
            Row("FedAvg", "feddw(mu=0)"),
            Row("FedDW", "feddw(mu=0.1)"),
        ],
        columns=[Column("CIFAR-10 pathological", {**CIFAR10, **PATHOLOGICAL})],
        measures=[
            accuracy("accuracy"),
            diagnostic("distance", "distance of class relations to soft labels", smaller=True),
        ],
        base={**BASE, "diagnose_every": 10},
        cpu={**LESS, "diagnose_every": 2},
        reduced=SMALLER,
        seeds=(0,),
        drawn=("inside",),
        notes=(
            FLAT,
            "Distance is the Frobenius norm of the difference of both matrices. Data set and setting are our choice.",
        ),
    ),
    "term": Grid(
        "FedDW, not in the paper: its term and its classifier without bias apart",
        rows=[
            Row("FedAvg", "fedavg"),
            Row("no bias", "feddw(mu=0)"),
            *(Row(f"no bias, μ = {mu}", f"feddw(mu={mu})") for mu in (0.1, 10)),
        ],
        columns=[column for column in SETTINGS if column.label.startswith(("MNIST", "CIFAR-10 "))],
        measures=[ON_GLOBAL],
        base=BASE,
        reduced=SMALLER,
        notes=(
            "FedDW trains a classifier without bias, and adds its term with weight μ. The runs of FedAvg and of "
            "μ = 0.1 are those of Table I.",
        ),
    ),
}
