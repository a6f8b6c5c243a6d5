"""Tables of privacy filters, adaptive noise and centred features, from their results files."""

from __future__ import annotations

import json
import statistics

from tables import ABSENT, RESULTS, load, table


def features_centred() -> str:
    """Balanced features with and without the mean of the drawings, on held-out training examples."""
    path = RESULTS / "features_centred.jsonl"
    if not path.exists():
        return ABSENT
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rates = list(dict.fromkeys(key for line in lines for key in line["accuracy"]))
    head = ["set", "features", "seed", *(f"average {a}, rate {r}" for a, _, r in (key.partition("/") for key in rates))]
    rows = [
        [line["dataset"], line["features"], f"{line['seed']}", *(f"{line['accuracy'][key]:.4f}" for key in rates)]
        for line in lines
    ]
    size = f"{lines[0]['batch']} x {lines[0]['steps']}, epsilon {lines[0]['epsilon']:g}"
    return f"{size}; 2 CPU cores; `{lines[0]['command']}`.\n\n{table(head, rows)}"


def filter_price() -> str:
    """What a privacy filter costs against the PLD of the same noises."""
    data = load("filter_price")
    if data is None:
        return ABSENT
    head = ["sample rate", "steps", *(f"epsilon {e:g} by PLD" for e in data["epsilons"])]
    rows = [
        [
            f"{row['rate']:g}",
            f"{row['steps']}",
            *(
                f"{c['filter']:.3f} (+{c['price']:.1%}; sigma {c['sigma']:.2f}, order {c['order']:g})"
                for c in row["cells"]
            ),
        ]
        for row in data["rows"]
    ]
    return f"Epsilon by the filter; `{data['machine']['command']}`.\n\n{table(head, rows)}"


def adaptive() -> str:
    """dyn-adaptive beside the other proved strategies, each at its best learning rate."""
    data = load("adaptive")
    if data is None:
        return ABSENT
    rows = []
    for name, setting in data["settings"].items():
        mine = [row for row in data["rows"] if row["setting"] == name]
        for epsilon in setting["epsilons"]:
            for strategy in dict.fromkeys(row["strategy"] for row in mine):
                here = [row for row in mine if (row["epsilon"], row["strategy"]) == (epsilon, strategy)]
                by_rate = {lr: [row for row in here if row["lr"] == lr] for lr in setting["lrs"]}
                by_rate = {lr: found for lr, found in by_rate.items() if found}
                if not by_rate:
                    continue
                lr, best = max(by_rate.items(), key=lambda kv: statistics.fmean(row["accuracy"] for row in kv[1]))
                accuracies = [row["accuracy"] for row in best]
                spread = f"{min(accuracies):.4f} to {max(accuracies):.4f}"
                rows.append(
                    [
                        name,
                        f"{epsilon:g}",
                        strategy,
                        f"{statistics.fmean(accuracies):.4f}",
                        spread,
                        f"{len(best)}",
                        f"{lr:g}",
                    ]
                )
    told = "; ".join(
        f"{name}: {s['run']['model']}, B = {s['run']['batch_size']}, {s['run']['steps']} steps, {s['held_out']} "
        f"training examples held out, rates {', '.join(f'{lr:g}' for lr in s['lrs'])}"
        for name, s in data["settings"].items()
    )
    head = ["set", "epsilon", "strategy", "held-out accuracy", "seeds from, to", "seeds", "best rate"]
    return f"{told}. 2 CPU cores; `{data['machine']['command']}`.\n\n{table(head, rows)}"


def adaclip_spread() -> str:
    """The growth of AdaClip's squared spread in a step, predicted and measured."""
    data = load("adaclip_spread")
    if data is None:
        return ABSENT
    rows = [
        [
            row["layer"],
            f"{row['coordinates']}",
            f"{row['batch']}",
            f"{row['sigma']:g}",
            f"{row['predicted']:.3f}",
            f"{row['measured']:.3f}",
        ]
        for row in data["rows"]
    ]
    head = ["layer", "coordinates", "B", "sigma", "s^2 grows in a step by, predicted", "measured"]
    told = (
        f"All examples clipped, random directions, {data['steps']} steps; the prediction is for equal spreads, which "
        "stay equal only where they shrink. "
    )
    return f"{told}`{data['machine']['command']}`.\n\n{table(head, rows)}"
