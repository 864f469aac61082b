"""The figures of a run and of a comparison, with the words that go with them."""

from fedalloy.report import figures
from fedalloy.report.page import Picture
from fedalloy.report.runs import MEASURES, Comparison, Run

BAND = "Line: mean over seeds. Band: from the lowest to the highest seed."
SO_FAR = "Traffic is upload plus download of all clients, from round 1 on."
SLOT = "A slot is one kind of content that a method sends."
BOX = "A point is a client. The box holds the middle half of the clients, the line in it is the median."


def run_pictures(run: Run) -> list[Picture]:
    """Every figure of one run; those without data are only named."""
    alone = {run.title: [run]}
    judged = run.measures.get(run.metric, run.metric)
    return [
        Picture(
            "accuracy", "Accuracy by round", "All accuracies that were recorded.", figures.accuracies(run)
        ),
        Picture(
            "loss",
            "Training loss by round",
            "Mean over the clients that took part.",
            figures.curves(alone, "train_loss"),
        ),
        Picture(
            "traffic",
            "Accuracy by traffic",
            f"{judged}. {SO_FAR}",
            figures.accuracy_by_traffic(alone, run.metric),
        ),
        _partition(run),
        Picture("clients", "Accuracy by client", f"Last evaluation. {BOX}", figures.client_spread(alone)),
        Picture(
            "classes", "Accuracy by class", "Last evaluation.", figures.class_accuracy(alone, run.metric)
        ),
        Picture("time", "Time by round", "Seconds of every round, by phase.", figures.time_by_round(run)),
        Picture(
            "slots",
            "Traffic by slot",
            f"Sum over all clients and rounds. {SLOT}",
            figures.traffic_by_slot(alone),
        ),
    ]


def comparison_pictures(comparison: Comparison) -> list[Picture]:
    """Every figure of a comparison; accuracies have one figure for each measure that a method is judged by."""
    groups = {
        comparison.label(method): list((comparison.complete(method) or runs).values())
        for method, runs in comparison.runs.items()
        if runs
    }
    by_round, by_traffic, by_class = [], [], []
    for measure in comparison.headlines:
        name = MEASURES.get(measure, measure)
        lines = figures.curves(groups, measure)
        by_round.append(Picture(f"accuracy-{measure}", f"Accuracy by round: {name}", BAND, lines))
        spent = figures.accuracy_by_traffic(groups, measure)
        by_traffic.append(
            Picture(f"traffic-{measure}", f"Accuracy by traffic: {name}", f"{SO_FAR} {BAND}", spent)
        )
        bars = figures.class_accuracy(groups, measure)
        last = "Last evaluation, mean over seeds."
        by_class.append(Picture(f"classes-{measure}", f"Accuracy by class: {name}", last, bars))
    return [
        *by_round,
        *by_traffic,
        *map(_partition, comparison.every_run[:1]),
        Picture(
            "clients",
            "Accuracy by client",
            f"Last evaluation, all seeds. {BOX}",
            figures.client_spread(groups),
        ),
        *by_class,
        Picture(
            "time",
            "Time of a round",
            "Seconds by phase, mean over rounds and seeds.",
            figures.time_by_method(groups),
        ),
        Picture(
            "slots",
            "Traffic by slot",
            f"Sum over all clients and rounds of a run, mean over seeds. {SLOT}",
            figures.traffic_by_slot(groups),
        ),
    ]


def _partition(run: Run) -> Picture:
    drawn = figures.partition_picture(run.partition)
    caption = f"Training samples of each class at each client, seed {run.config.get('seed', 0)}."
    return Picture("partition", "Data of the clients", caption, drawn)
