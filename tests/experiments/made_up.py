"""Results that nobody ran: what each cell would say if accuracies were as a function of its settings says."""

from __future__ import annotations

from gradveil.accounting import paper_curve
from gradveil.training.data import CATALOGUE


def result(cell, accuracy):
    settings = dict(cell.settings)
    shared = {"kind": cell.kind, "settings": settings, "machine": "none", "seconds": 1.0}
    if cell.kind == "train":
        return shared | train(settings, accuracy(settings))
    if cell.kind == "time":
        took = [1.0 if row["strategy"] == "non-private" else 3.0 for row in settings["rows"]]
        return shared | {"seconds_per_step": [[seconds] * settings["repeats"] for seconds in took]}
    return shared | attack(settings)


def train(settings, accuracy):
    steps, private = settings["steps"], settings["strategy"] != "non-private"
    every = settings["evaluate_every"]
    proved = "inf" if not private or settings.get("reading") else 1.0
    sigma = settings.get("sigma", 6.0)
    curve = {}
    if private:
        rate = settings["batch_size"] / CATALOGUE[settings["dataset"]].train
        curve = paper_curve([sigma] * steps, rate, 1e-5)
    trace = []
    for step in range(every, steps + 1, every):
        look = {"step": step, "accuracy": accuracy * min(1.0, 0.5 + step / steps), "loss": 1.0}
        if private:
            look |= {"clip": 4.0, "sigma": sigma, "noise_std": 24.0, "proved_rdp": None if proved == "inf" else 0.5}
            look["as_published"] = {m: float(v[step - 1]) for m, v in curve.items()}
        trace.append(look)
    return {
        "accuracy": accuracy,
        "steps": steps,
        "ended": "finished",
        "seconds_per_step": 0.01,
        "proved": {"epsilon": proved},
        "as_published": {m: float(v[-1]) for m, v in curve.items()},
        "trace": trace,
    }


def attack(settings):
    open_ = settings.get("strategy", "non-private") == "non-private"
    psnr = 60.0 if open_ else 3.0 if settings["attack"] == "cpl" else 16.0
    found = {
        "psnr_median": psnr,
        "success_rate": 1.0 if open_ else 0.0,
        "labels_right": 1.0,
        "guess_psnr_median": 12.0,
        "iterations_to_30_db_median": 5.0 if open_ else None,
        "paper": {"asr_mse_per_pixel": 1.0, "asr_l2_distance": float(open_)},
    }
    return {"result": found, "success_bound": None if open_ else 0.9, "dataset": settings["dataset"]}
