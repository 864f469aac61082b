"""SSF (Zhu, Huang, Xu, Li 2026, arXiv 2604.25467) on CIFAR-100, Figure 3; the matrix regression is in `matrix`."""

from fedalloy.research.reproduce.grid import Column, Grid, Row, accuracy, megabytes

ITEMS: dict[str, Grid] = {
    "cifar100": Grid(
        "SSF Figure 3: CIFAR-100 with ResNet-110, test accuracy after 100 epochs",
        rows=[
            Row("FedAvg", "fedavg(agg_weights=uniform)", (34.4, None, None)),
            Row("FedSub δ=0.2", "fedsub(ratio=0.2)", (23.2, None, None)),
            Row("FedSub δ=0.2 orthonormal", "fedsub(ratio=0.2, projector=haar)"),
            Row("SSF δ=0.1", "ssf(ratio=0.1)"),
            Row("SSF δ=0.2", "ssf(ratio=0.2)", (45.4, None, None)),
            Row("SSF δ=0.5", "ssf(ratio=0.5)"),
            Row("SCAFFOLD", "scaffold"),
        ],
        columns=[Column("")],
        measures=[
            accuracy("accuracy"),
            megabytes("upload per round (MiB)", "up"),
            megabytes("download per round (MiB)", "down"),
        ],
        base={
            "data": "cifar100",
            "model": "resnet110",
            "clients": 4,
            "skew": "pathological:25",
            "augment": "flip",
            "rounds": 3907,
            "steps": 10,
            "batch": 32,
            "lr": 0.1,
            "eval_every": 39,
            "checkpoint_every": 39,
        },
        cpu={
            "data": "cifar10",
            "model": "cnn-feddw",
            "lr": 0.05,
            "skew": "pathological:3",
            "limit": 5000,
            "rounds": 150,
            "eval_every": 10,
            "checkpoint_every": 10,
        },
        reduced="CIFAR-10 in place of CIFAR-100, 5,000 samples, 3 of 10 classes per client, "
        "a net of two convolutions and three linear layers without BatchNorm in place of ResNet-110, "
        "rate 0.05, 150 rounds of 10 steps (about 38 epochs)",
        notes=(
            "Only a summary of the paper was at hand. 34.4 and 23.2 are printed as a pair for FedAvg and FedSub; "
            "SCAFFOLD is 7 to 8 points above SSF in its Figure 3.",
            "Clients, skew, learning rate, batch and K = 10 are those of FedSub's public ResNet-110 script; 3,907 "
            "rounds of 4 x 10 x 32 samples are 100 epochs. Other values of δ and the orthonormal projector are ours.",
            "Progress per round scales with δ: look at the megabytes too.",
        ),
    ),
}
