"""Write the tables of README.md and docs from the results files.

    python benchmarks/render.py            # writes
    python benchmarks/render.py --check    # exit code 1 and the names, where a document is not what the results say

A table stands between <!-- begin NAME --> and <!-- end NAME -->; a results file that is not there gives the line
"not measured yet".
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable
from typing import Any

import adaptive_tables
import speed_tables
import zoo_tables
from speed_tables import machine, steps_beside
from tables import ABSENT, RESULTS, ROOT, attack_strength, load, table

FIGURES = ROOT / "docs" / "figures"
DOCUMENTS = (
    "README.md", "docs/performance.md", "docs/attacks.md", "docs/attacks-text.md", "docs/auditing.md",
    "docs/reproduction.md", "docs/recipes.md", "docs/scaling.md", "docs/strategies.md", "docs/networks.md",
    "docs/accounting.md", "docs/architecture.md", "docs/cli.md", "docs/strategy-table.md",
    *(f"docs/reproduction/{path.name}" for path in sorted((ROOT / "docs" / "reproduction").glob("*.md"))),
)  # fmt: skip
# ---- README.md


def mnist_full_length() -> str:
    data = load("mnist_full_length")
    if data is None:
        return ABSENT
    rows = []
    for name, summary in data["summary"].items():
        cell = next(c for c in data["cells"] if c["run"] == name)
        proved, published = cell["proved"]["epsilon"], cell["as_published"].get("MA")
        rows.append(
            [
                name,
                f"{summary['accuracy_mean']:.4f}",
                "infinite" if proved == "inf" else f"{proved:.3f}",
                "-" if published is None else f"{published:.3f}",
                f"{summary['seconds_per_step_median']:.4f}",
            ]
        )
    return table(["run", "accuracy", "proved epsilon", "MA, as published", "seconds per step"], rows)


def recipes() -> str:
    """Accuracy at a proved epsilon, and the command for it."""
    data = load("reproduction/proved-accuracy")
    if data is None:
        return ABSENT
    rows = []
    for entry in data["entries"]:
        beside, told = entry["beside"], entry["published"]
        paper = "-" if told is None else f"{told:.3f} at .823, not proved"
        command = f"`gradveil train --recipe {entry['recipe']}`"
        rows.append([command, beside["proved epsilon"], f"{entry['mean']:.4f}", f"{entry['spread']:.4f}", paper])
    return table(["", "proved epsilon", "accuracy", "spread", "the paper's best"], rows)


# ---- docs/architecture.md


def packages() -> str:
    """What each package holds and may import: docs/packages.toml, to which tests/test_imports.py holds the code."""
    rows = tomllib.loads((ROOT / "docs" / "packages.toml").read_text()).items()
    shown = [
        [f"`{name}`", row["holds"], ", ".join(f"`{other}`" for other in row["may_import"]) or "-"] for name, row in rows
    ]
    return table(["package", "holds", "may import"], shown)


# ---- docs/cli.md


def commands() -> str:
    """``--help`` of every command, as click prints it in 100 columns."""
    import click

    from gradveil.cli import cli

    def pages(command: click.Command, parent: click.Context | None) -> list[str]:
        name = str(command.name) if parent is not None else "gradveil"
        settings = {**command.context_settings, "terminal_width": 100, "max_content_width": 100}
        ctx = click.Context(command, info_name=name, parent=parent, **settings)
        inner = (
            [command.get_command(ctx, n) for n in command.list_commands(ctx)]
            if isinstance(command, click.Group)
            else []
        )
        shown = f"## {ctx.command_path}\n\n```text\n{command.get_help(ctx)}\n```"
        return [shown, *(page for found in inner if found is not None for page in pages(found, ctx))]

    return "\n\n".join(pages(cli, None))


# ---- docs/strategy-table.md


def strategy_table() -> str:
    """The registered strategies, as `gradveil strategies` lists them."""
    from gradveil.mechanism import strategies

    guarantees = {"proved": "proved", "paper-only": "as published only", "none": "none"}
    rows = []
    for name in strategies.names():
        s = strategies.get(name)
        summary = s.summary.replace("|", "\\|")
        rows.append([f"`{name}`", s.bounds, s.sensitivity, s.noise, guarantees[s.guarantee], summary, s.source or "-"])
    return table(["strategy", "clip bound", "noise scaled to", "sigma", "guarantee", "summary", "source"], rows)


# ---- docs/strategies.md


def from_any_bound() -> str:
    """Where dyn-private ends, from which bound, and where the baseline does."""
    data = load("reproduction/starting-bounds")
    if data is None:
        return ABSENT
    reached = {run: f"{accuracy:.3f}".lstrip("0") for run, accuracy in data["data"]["accuracy"].items()}
    ours = [f"{end} from {run.rpartition(' ')[2]}" for run, end in reached.items() if run.startswith("dyn-private")]
    baseline = [run for run in reached if run.startswith("baseline")]
    best = max(baseline, key=data["data"]["accuracy"].__getitem__)
    epsilon = data["tables"][0]["rows"][0][data["tables"][0]["head"].index("proved epsilon")]
    return (
        f"On MNIST at full length and a proved epsilon of {epsilon}, it ends at {', '.join(ours)}; the baseline at "
        f"{reached[best]} with the best of {len(baseline)} clip bounds, and at {reached[baseline[-1]]} with "
        f"{baseline[-1].rpartition(', ')[2]}\n([starting bounds](reproduction/starting-bounds.md))."
    )


# ---- docs/attacks.md


def leakage(name: str) -> str:
    """One row for each data set and strategy; both attacks beside the best guess and the bound."""
    data = load(name)
    if data is None:
        return ABSENT
    rows = []
    by_key = {(r["dataset"], r["strategy"], r["attack"]): r for r in data["rows"]}
    for dataset, strategy in dict.fromkeys((d, s) for d, s, _ in by_key):
        cpl, knows = by_key[dataset, strategy, "cpl"], by_key[dataset, strategy, "map"]
        cells = [dataset, strategy]
        for found in (cpl["result"], knows["result"]):
            low, high = found["psnr_median_interval"]
            cells += [f"{found['psnr_median']:.1f} ({low:.1f} to {high:.1f})", f"{found['success_rate']:.0%}"]
        result, bound = knows["result"], knows["success_bound"]
        reached = result["iterations_to_30_db_median"]
        paper = cpl["result"]["paper"]
        cells += [
            f"{result['guess_psnr_median']:.1f}",
            f"{result['ssim_median']:.2f}",
            f"{result['retrieved_first']:.0%}",
            f"{result['labels_right']:.0%}",
            "-" if reached is None else f"{reached:.0f}",
            f"{paper['asr_mse_per_pixel']:.0%} / {paper['asr_l2_distance']:.0%}",
            "none" if bound is None else f"{bound:.2f}",
        ]
        rows.append(cells)
    head = ["set", "strategy", "cpl, dB", "succeeds", "map, dB", "succeeds", "best guess, dB", "SSIM", "found again"]
    return table([*head, "labels", "iterations to 30 dB", "the paper's ASR of cpl", "bound on success"], rows)


def text_attack() -> str:
    data = load("text_attack")
    if data is None:
        return ABSENT
    rows = []
    for cell in data["cells"]:
        found, guess = cell["score"], cell["chance"]
        shares = [f"{found[k]:.1%}" for k in ("tokens", "in_place", "sentences")]
        rows.append(
            [
                cell["model"],
                cell["defence"],
                *shares,
                *(f"{found[k]:.2f}" for k in ("rouge_1", "rouge_2", "rouge_l")),
                f"{guess['tokens']:.1%}",
                f"{cell['ranked_above_absent']:.1%}",
                f"{cell['sure']:.0%}",
                f"{cell['seconds']:.1f}",
            ]
        )
    head = ["model", "defence", "tokens", "in place", "sentences", "ROUGE-1", "ROUGE-2", "ROUGE-L", "tokens by chance"]
    return table([*head, "ranked above absent", "sure", "s"], rows)


def leakage_speed(name: str) -> str:
    data = load(name)
    if data is None or "speed" not in data:
        return ABSENT
    found = data["speed"]
    return (
        f"{found['victims_at_once']} MNIST victims at once: {found['seconds_per_victim_at_once']:.3f} s each. One "
        f"after the other with torch.optim.LBFGS, to the same end ({found['victims_alone']} victims): "
        f"{found['seconds_per_victim_alone']:.2f} s each, {found['ratio']:.0f} times as long. {data['machine']}."
    )


# ---- docs/reproduction.md and a page for each experiment: what ``gradveil reproduce NAME --full`` wrote


def reproduced(name: str) -> str:
    """One experiment: how it was run, its tables, its figure."""
    data = load(f"reproduction/{name}")
    if data is None:
        return ABSENT
    versions = ", ".join(f"{package} {version}" for package, version in data["versions"].items())
    sets = data["plan"]["sets"]
    chosen = f" --sets {','.join(sets)}" if sets else ""
    command = f"gradveil reproduce {data['experiment']} --{data['plan']['scale']}{chosen}"
    rates = ", ".join(f"{rate:g}" for rate in data["learning_rates"])
    told = f"`{command}`: {data['cells']} cells, {data['seconds']:.0f} seconds of them in all. "
    told += f"{'; '.join(data['machines'])}."
    told += f" {versions}." + (f" Learning rate {rates}." if rates else "")
    told += f" Seeds {', '.join(map(str, data['seeds']))}." if data["seeds"] else ""
    parts = [told, *(_experiment_table(found) for found in data["tables"])]
    drawn = [f"reproduction_{name}.{suffix}" for suffix in ("svg", "png")]
    parts += [f"![{data['title']}](../figures/{file})" for file in drawn if (FIGURES / file).exists()]
    return "\n\n".join(parts)


def _experiment_table(found: dict[str, Any]) -> str:
    shown = table(found["head"], found["rows"]) + (f"\n\n{found['note']}" if found["note"] else "")
    if found["folded"]:
        return f"<details>\n<summary>{found['title']}</summary>\n\n{shown}\n\n</details>"
    return f"**{found['title']}**\n\n{shown}"


def claims() -> str:
    """Every claim of every experiment that was run."""
    rows = []
    for path in sorted((RESULTS / "reproduction").glob("*.json")):
        data = json.loads(path.read_text())
        where = " (CPU)" if path.stem.endswith("-cpu") else ""  # one experiment on two machines
        rows += [[c["name"] + where, c["text"], c["verdict"], c["evidence"]] for c in data["claims"]]
    return table(["", "claim", "here", "figures"], rows) if rows else ABSENT


# ---- docs/scaling.md


def ranks() -> str:
    """Throughput over processes."""
    data = load("ranks_cpu")
    if data is None:
        return ABSENT
    rows = [
        [
            str(row["processes"]),
            f"{row['examples_per_second']:.1f}",
            f"{row['seconds_per_step']:.3f}",
            f"{row['seconds_in_sums']:.3f}",
            f"{row['share_of_ideal']:.2f}",
        ]
        for row in data["rows"]
    ]
    head = ["processes", "examples per second", "seconds per step", "of these in sums and waiting", "share of ideal"]
    told = (
        f"{data['machine']['machine']}; {data['workload']}, {data['batch']} examples for each process on average, "
        f"{data['steps']} steps, median of {data['rounds']} rounds; `{data['machine']['command']}`. Ideal: the "
        f"throughput of one process times their number, up to the {data['cores']} cores."
    )
    return f"{told}\n\n{table(head, rows)}"


def gpt2() -> str:
    """A private step of GPT-2 beside a plain one."""
    data = load("gpt2_cuda")
    if data is None:
        return ABSENT
    rows = []
    for kind, modes in data["results"].items():
        for mode, found in modes.items():
            shown = [found["failed"], "", ""] if "failed" in found else [
                f"{1e3 * found['median']:.1f}", f"{found['ratio']:.2f}", f"{found['memory_ratio']:.2f}"
            ]  # fmt: skip
            rows.append(["LoRA, rank 8" if kind == "lora" else "all parameters", mode, *shown])
    told = (
        f"{data['machine']['machine']}; batch {data['batch']}, {data['length']} tokens, "
        f"{'bfloat16 autocast' if data['bf16'] else 'float32'}; `{data['machine']['command']}`."
    )
    return f"{told}\n\n{table(['', 'mode', 'ms per step', 'over plain', 'peak memory over plain'], rows)}"


def audit_bounds() -> str:
    """The audit's bounds on a mechanism whose epsilon is known."""
    data = load("audit_bounds")
    if data is None:
        return ABSENT
    told = f"{data['bits']} bits, delta {data['delta']:g}, {data['seeds']} seeds; `{data['machine']['command']}`."
    head = ["sigma", "true epsilon", "bound", "median", "5 % of seeds are below", "seeds above the truth"]
    rows = [
        [f"{r['sigma']:g}", f"{r['truth']:.2f}", r["bound"], f"{r['median']:.2f}", f"{r['low']:.2f}", str(r["above"])]
        for r in data["rows"]
    ]
    return f"{told}\n\n{table(head, rows)}"


def features_tried() -> str:
    """The ways that were tried to train a linear layer on fixed features."""
    path = RESULTS / "features_tried.jsonl"
    if not path.exists():
        return ABSENT
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rows = []
    for line in lines:
        average, _, rate = line["best"].partition("/")
        other = [f"{k} {line[k]:g}" for k, usual in (("clip", 0.1), ("momentum", 0.9)) if line[k] != usual]
        other += ["learning rate falls as a cosine"] * (line["schedule"] == "cosine")
        told = line["features"] + (", and mirrored" if line["mirror"] else "")
        size = f"{line['batch']} x {line['steps']}"
        where = f"{rate}, averaged {average}" if average != "0" else rate
        accuracy = f"{line['accuracy'][line['best']]:.4f}"
        rows.append([line["dataset"], told, f"{line['epsilon']:g}", size, ", ".join(other), accuracy, where])
    runs = sum(len({key.partition("/")[2] for key in line["accuracy"]}) for line in lines)
    head = ["set", "features", "epsilon", "batch x steps", "other than usual", "best accuracy", "at learning rate"]
    said = f"{lines[0]['machine']}; {runs} runs, one seed; `python benchmarks/try_features.py --dataset SET`."
    return f"{said}\n\n{table(head, rows)}"


def cost_model() -> str:
    data = load("cost_model")
    if data is None:
        return ABSENT
    a = data["assumptions"]
    rows = [
        [
            f"{row['processes']:.0f}",
            *(f"{row[k]:.3f}" for k in ("compute", "waiting", "sums", "noise", "step")),
            f"{row['bytes_sent'] / 1e9:.1f}",
            f"{row['flops_per_process']:.2g}",
            f"{row['sampling']:.3f}",
        ]
        for row in data["rows"]
    ]
    told = (
        f"Predicted, not measured: {a['parameters']:.0e} parameters, {a['batch']} sequences of {a['tokens']} tokens a "
        f"batch, {a['examples']:.0e} examples in all; {a['flops_per_second']:.0e} FLOP/s for each GPU, sums at "
        f"{a['link_inside'] / 1e9:.0f} GB/s inside a machine of {a['gpus_per_machine']} and "
        f"{a['link_between'] / 1e9:.0f} between; a private step takes {a['private_over_plain']} x a plain one. Seconds:"
    )
    head = ["GPUs", "compute", "waiting for the fullest", "sums", "noise", "step"]
    head += ["GB sent by each", "FLOPs of each", "sampling, on the CPU"]
    held = "".join(
        f"\n- {row['processes']} processes: predicted {row['predicted']:.3f} s a step, measured {row['measured']:.3f}"
        for row in data.get("held_against", [])
    )
    return f"{told}\n\n{table(head, rows)}\n\nThe same model, held against the measurement above:\n{held}"


def figure(name: str, what: str) -> str:
    return f"![{what}](figures/{name}.svg)" if (FIGURES / f"{name}.svg").exists() else "not drawn yet"


TABLES: dict[str, Callable[[], str]] = {
    "mnist_full_length": mnist_full_length,
    "recipes": recipes,
    "packages": packages,
    "commands": commands,
    "strategy_table": strategy_table,
    "steps_beside": steps_beside,
    "from_any_bound": from_any_bound,
    "ranks_cpu": ranks,
    "gpt2": gpt2,
    "cost_model": cost_model,
    "features_tried": features_tried,
    "audit_bounds": audit_bounds,
    "filter_price": adaptive_tables.filter_price,
    "features_centred": adaptive_tables.features_centred,
    "adaptive": adaptive_tables.adaptive,
    "adaclip_spread": adaptive_tables.adaclip_spread,
    "zoo_counts": zoo_tables.zoo_counts,
    "zoo_exceptions": zoo_tables.zoo_exceptions,
    "any_network": zoo_tables.any_network,
    "machine_leakage_cuda": lambda: machine("leakage_cuda"),
    "leakage_cuda": lambda: leakage("leakage_cuda"),
    "attack_strength": attack_strength,
    "machine_attack_strength": lambda: machine("attack_strength"),
    "text_attack": text_attack,
    "machine_text_attack": lambda: machine("text_attack"),
    "leakage_speed_cuda": lambda: leakage_speed("leakage_cuda"),
    "figure_leakage_cuda": lambda: figure("leakage_cuda", "How near attacks come, by data set and strategy"),
}
REPRODUCED = (
    "leakage", "attack-frames", "fixed-parameters", "sensitivity", "accounting", "target-accuracy", "fixed-variance",
    "last-scenario", "noise-decay", "noise-decay-target", "noise-variance", "time", "time-cpu", "adaptive-clipping",
    "equal-epsilon", "proved-accuracy", "starting-bounds", "triangle",
)  # fmt: skip
TABLES["reproduction_claims"] = claims
TABLES |= {f"reproduction_{name.replace('-', '_')}": lambda name=name: reproduced(name) for name in REPRODUCED}
for _device in ("cpu", "cuda"):
    _s, _g = f"speed_{_device}", f"scaling_{_device}"
    TABLES |= {
        f"machine_{_s}": lambda s=_s: machine(s),
        _s: lambda s=_s: speed_tables.speed(s, speed_tables.OURS),
        f"peers_{_device}": lambda s=_s: speed_tables.speed(s, speed_tables.PEERS),
        f"channels_last_{_device}": lambda s=_s: speed_tables.channels_last(s),
        f"memory_{_device}": lambda s=_s: speed_tables.memory(s),
        f"captured_{_device}": lambda s=_s: speed_tables.captured(s),
        f"figure_{_s}": lambda s=_s: figure(s, "One step in units of a plain SGD step, by workload and mode"),
        f"machine_{_g}": lambda g=_g: machine(g),
        _g: lambda g=_g: speed_tables.scaling(g),
        f"figure_{_g}": lambda g=_g: figure(g, "Milliseconds of a step by batch and by depth"),
    }


def rendered(text: str) -> str:
    """The document with its tables as the results files have them; refused for a table nobody writes."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- begin {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end {match[1]} -->"

    return re.sub(r"<!-- begin (\w+) -->\n.*?<!-- end \1 -->", fill, text, flags=re.DOTALL)


def main() -> None:
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        before = path.read_text()
        after = rendered(before)
        if after != before:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(after)
    if "--check" in sys.argv and stale:
        sys.exit(f"not what the results files say: {', '.join(stale)}. Run: python benchmarks/render.py")


if __name__ == "__main__":
    main()
