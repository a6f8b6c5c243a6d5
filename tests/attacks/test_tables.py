"""Tables of bits: attacked as images are, judged by how many features are wrong."""

import json

import pytest
import torch

from gradveil.attacks.methods.analytic import Analytic
from gradveil.attacks.methods.base import Reconstruction
from gradveil.attacks.methods.inversion import MAP
from gradveil.attacks.observation.observe import observe
from gradveil.attacks.observation.views import GroundTruth
from gradveil.attacks.scoring.evaluate import controls, fewest_wrong, score, table_rows
from gradveil.attacks.scoring.guessing import guessing_chance
from gradveil.attacks.scoring.metrics import is_binary, psnr, wrong_features
from gradveil.attacks.scoring.scores import TableScore
from gradveil.attacks.trial import NAMES, AttackConfig, run
from gradveil.attacks.untrained import sigmoid_mlp
from gradveil.cli import cli
from gradveil.mechanism.strategies import parameters
from gradveil.training import models
from gradveil.training.data import CATALOGUE, DataSet

FEATURES, CLASSES = 60, 4


@pytest.fixture(scope="module")
def table():
    """Rows about the prototype of their class: a fifth of the bits is 1."""
    generator = torch.Generator().manual_seed(0)
    prototypes = (torch.rand(CLASSES, FEATURES, generator=generator) < 0.2).float()
    y = torch.randint(CLASSES, (1500,), generator=generator)
    flips = torch.rand(len(y), FEATURES, generator=generator) < 0.15
    x = torch.where(flips, 1.0 - prototypes[y], prototypes[y])
    parts = {"x_train": x[:1200], "y_train": y[:1200], "x_test": x[1200:], "y_test": y[1200:]}
    return DataSet(name="rows", classes=CLASSES, input_shape=(FEATURES,), kind="tabular", note="made up", **parts)


def found(x):
    nobody = torch.zeros(len(x))
    labels = torch.zeros(x.shape[:2], dtype=torch.int64)
    return Reconstruction(x=x, labels=labels, loss=nobody, losses=[], frames={}, failed=nobody.bool())


def flipped(x, count):
    x = x.clone()
    x[..., :count] = 1.0 - x[..., :count]
    return x


def test_wrong_features_are_counted_after_rounding():
    truth = torch.tensor([[[0.0, 1.0, 1.0, 0.0]]])
    near = torch.tensor([[[0.4, 0.6, 7.0, -3.0]]])
    assert wrong_features(near, truth).tolist() == [[0]]
    assert wrong_features(1.0 - near, truth).tolist() == [[4]]
    assert wrong_features(torch.full_like(near, float("nan")), truth).tolist() == [[2]]
    assert is_binary(truth) and not is_binary(near) and not is_binary(torch.zeros(2, 1, 1, 8, 8))


def test_the_guess_is_the_best_of_zeros_ones_and_the_rounded_mean():
    truth = torch.tensor([[[0.0, 0.0, 0.0, 1.0]], [[1.0, 1.0, 1.0, 0.0]], [[1.0, 1.0, 0.0, 0.0]]])
    mean = torch.tensor([0.9, 0.6, 0.2, 0.1])
    assert fewest_wrong(truth, mean).tolist() == [[1], [1], [0]]


def test_success_is_a_quarter_of_the_guess_which_is_the_margin_of_images():
    truth = torch.zeros(3, 1, 40)
    truth[..., :8] = 1.0  # all zeros are wrong in 8: a success has at most 2
    secret = GroundTruth(truth, torch.zeros(3, 1, dtype=torch.int64))
    x = torch.cat([flipped(truth[:1], n) for n in (0, 2, 3)])
    judged = score(found(x), secret, mean_image=torch.zeros(40))
    assert isinstance(judged, TableScore)
    assert judged.wrong.tolist() == [0, 2, 3] and judged.guess_wrong.tolist() == [8, 8, 8]
    assert judged.success.tolist() == [True, True, False]
    # 6 dB above the guess, PSNR taken of the bits
    guess = float(psnr(torch.zeros(1, 1, 40), truth[:1]))
    assert float(psnr(x[1:2], truth[:1])) - guess == pytest.approx(6.0, abs=0.03)
    summary = judged.summary()
    assert summary["exact"] == pytest.approx(1 / 3) and summary["success_curve"]["0.05"] == pytest.approx(2 / 3)
    assert "psnr_median" not in summary and "ssim_median" not in summary
    (row,) = table_rows([("mine", judged)])
    assert row[1].startswith("2 of 40") and len(row) == 1 + len(TableScore.headings)


def test_guessing_is_no_success(table):
    secret = GroundTruth(table.x_train[:20].unsqueeze(1), table.y_train[:20].unsqueeze(1))
    others = table.x_train[20:]
    mean = others.mean(0)
    guesses = controls(
        secret, mean_image=mean, others=others, seed=torch.rand(20, 1, FEATURES), generator=torch.Generator()
    )
    assert list(guesses) == [
        "all zeros",
        "rounded mean training row",
        "a random training row",
        "the untouched seed",
    ]
    for x in guesses.values():
        assert float(score(found(x), secret, mean_image=mean).success.double().mean()) <= 0.05
    assert guessing_chance(others[:600], None, mean) < 0.05
    # Where all rows are one row, guessing it always succeeds.
    same = table.x_train[:1].repeat(50, 1)
    assert guessing_chance(same, None, same.mean(0)) == 1.0


@pytest.mark.parametrize("attack", NAMES)
def test_every_attack_takes_rows_from_plain_gradients(table, attack):
    outcome = run(AttackConfig(attack=attack, victims=4, iterations=60), table).to_dict()
    result = outcome["result"]
    json.dumps(outcome, allow_nan=False)
    assert result["labels_right"] >= 0.75
    assert "wrong_median" in result and "psnr_median" not in result
    if attack in ("analytic", "map", "prior"):
        assert result["exact"] == 1.0 and result["retrieved_first"] == 1.0
    if attack in ("cpl", "idlg", "inverting"):
        assert result["success_rate"] >= 0.5  # a start stalls now and then


def test_a_layer_without_a_bias_gives_rows_of_bits_away_too(table):
    module = models.paper_mlp(FEATURES, CLASSES, generator=torch.Generator().manual_seed(0))
    x, y = table.x_train[:8].unsqueeze(1), table.y_train[:8].unsqueeze(1)
    for plan in (None, parameters("baseline", steps=3, clip=0.1, sigma=1.0)):
        seen, secret = observe(module, x, y, plan=plan, classes=CLASSES, generator=torch.Generator())
        stolen = Analytic().run(seen)
        assert int(wrong_features(stolen.x, secret.x).max()) == 0
        assert torch.equal(stolen.labels, secret.y)


def test_through_noise_the_defence_known_beats_the_guess_and_the_bound_stands_beside(table):
    outcome = run(
        AttackConfig(attack="map", strategy="baseline", view="per-example-noised", victims=6, iterations=120), table
    )
    judged = outcome.score
    assert isinstance(judged, TableScore)
    assert float(judged.wrong.double().mean()) < 0.5 * float(judged.guess_wrong.double().mean())
    assert outcome.bound is not None and outcome.kappa < outcome.bound


def test_nothing_is_smooth_about_a_table(table):
    """No total variation between columns: they have no order."""
    module = sigmoid_mlp(FEATURES, CLASSES, generator=torch.Generator().manual_seed(0))
    x, y = table.x_train[:3].unsqueeze(1), table.y_train[:3].unsqueeze(1)
    plan = parameters("baseline", steps=3, clip=1.0, sigma=1.0)
    seen, _ = observe(module, x, y, plan=plan, view="per-example-noised", classes=CLASSES, generator=torch.Generator())
    dummy = torch.rand(3, 1, FEATURES, generator=torch.Generator().manual_seed(1))
    assert torch.equal(MAP(variation=5.0).objective(seen, y)(dummy), MAP(variation=0.0).objective(seen, y)(dummy))


def test_batches_of_rows_are_matched_and_counted(table):
    outcome = run(AttackConfig(attack="map", victims=2, batch=3, view="batch", iterations=60), table).to_dict()
    assert outcome["result"]["examples"] == 6
    assert outcome["result"]["labels_right"] >= 0.8 and 0 < outcome["labels_guessed"] < 1


def test_the_command_on_purchase(tmp_path, capsys):
    """A small file in the published format: 600 bits a row, classes made by clustering."""
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.rand(10, 600, generator=generator) < 0.15
    lines = []
    for i in range(720):
        row = prototypes[i % 10] ^ (torch.rand(600, generator=generator) < 0.05)
        lines.append(",".join(["1", *(str(int(bit)) for bit in row)]))
    (tmp_path / "purchase").mkdir()
    (tmp_path / "purchase" / "purchase.csv").write_text("\n".join(lines) + "\n")
    settings = ["--dataset", "purchase-10", "--data-dir", str(tmp_path), "--victims", "2", "--iterations", "40"]
    out = tmp_path / "attack"
    arguments = ["attack", *settings, "--attack", "analytic", "--compare", "non-private,baseline", "--out", str(out)]
    cli(arguments, standalone_mode=False)
    printed = capsys.readouterr().out
    assert "wrong features" in printed and "(guess) all zeros" in printed and "PSNR" not in printed
    plain, _ = json.loads((out / "result.json").read_text())["trials"]
    assert plain["result"]["exact"] == 1.0


@pytest.mark.realdata
@pytest.mark.parametrize("attack", ["analytic", "cpl", "map"])
def test_location(attack, tmp_path, capsys):
    if not CATALOGUE["location"].available():
        pytest.skip("location is not in the GRADVEIL_DATA directory")
    few = ["--victims", "4", "--iterations", "40", "--out", str(tmp_path), "--json"]
    cli(["attack", "--dataset", "location", "--attack", attack, *few], standalone_mode=False)
    (trial,) = json.loads(capsys.readouterr().out)["trials"]
    assert trial["result"]["features"] == 446 and trial["result"]["labels_right"] == 1.0
    assert trial["result"]["exact"] >= (0.5 if attack == "cpl" else 1.0)
