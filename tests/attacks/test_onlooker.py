"""When examples came out, and what choosing by the truth would have given, without the attack knowing."""

from __future__ import annotations

import torch

from gradveil.attacks.methods.base import Reconstruction
from gradveil.attacks.observation.views import GroundTruth
from gradveil.attacks.scoring.oracle import Oracle, oracle
from gradveil.attacks.trial import AttackConfig, run
from gradveil.training import data


def _secret(batch: int = 1) -> GroundTruth:
    generator = torch.Generator().manual_seed(0)
    return GroundTruth(torch.rand(3, batch, 1, 8, 8, generator=generator), torch.zeros(3, batch, dtype=torch.int64))


def test_the_first_time_counts_and_who_never_came_out_does_not() -> None:
    secret = _secret()
    looker = Oracle(secret, torch.full((1, 8, 8), 0.5))
    x = torch.full_like(secret.x, 0.5)
    looker(1, x)
    x[0] = secret.x[0]
    looker(2, x)
    x[0] = 0.5
    x[1] = secret.x[1] + 0.1  # 20 dB: a success, and not clear
    looker(3, x)
    x[1] = secret.x[1]
    looker(4, x)
    assert looker.success.flatten().tolist() == [2, 3, -1]
    assert looker.clear.flatten().tolist() == [2, 4, -1]
    found = looker.summary()
    assert found["iterations_to_success_median"] == 2.0 and found["iterations_to_30_db_median"] == 2.0
    assert abs(found["ever_30_db"] - 2 / 3) < 1e-9


def test_the_examples_of_a_batch_may_come_out_in_another_order() -> None:
    secret = _secret(batch=4)
    looker = Oracle(secret, torch.full((1, 8, 8), 0.5))
    looker(7, secret.x.flip(1))
    assert bool((looker.clear == 7).all())


def test_nothing_came_out() -> None:
    looker = Oracle(_secret(), torch.full((1, 8, 8), 0.5))
    looker(1, torch.full((3, 1, 1, 8, 8), float("nan")))
    assert looker.summary()["iterations_to_30_db_median"] is None


def test_the_oracle_is_never_worse_than_the_attack() -> None:
    secret = _secret()
    attempts = (secret.x + 0.2, torch.where(torch.arange(3).view(3, 1, 1, 1, 1) == 1, secret.x, secret.x + 0.4))
    nobody = torch.zeros(3)
    chosen = Reconstruction(
        x=attempts[0], labels=secret.y, loss=nobody, losses=[], frames={}, failed=nobody.bool(), attempts=attempts
    )
    found = oracle(chosen, secret, torch.full((1, 8, 8), 0.5))
    assert found is not None and found["attempts"] == 2.0
    assert found["success_rate"] >= 1 / 3
    alone = Reconstruction(x=attempts[0], labels=secret.y, loss=nobody, losses=[], frames={}, failed=nobody.bool())
    assert oracle(alone, secret, torch.full((1, 8, 8), 0.5)) is None


def test_a_trial_reports_both() -> None:
    digits = data.load("digits")
    plain = run(AttackConfig(victims=4, attack="cpl", iterations=30), digits).to_dict()
    assert plain["oracle"] is None
    assert plain["result"]["iterations_to_30_db_median"] <= 15
    counted: list[int] = []
    trial = AttackConfig(victims=4, attack="map", strategy="baseline", view="per-example-noised", iterations=12)
    noised = run(trial, digits, progress=counted.append)
    assert noised.oracle is not None
    assert noised.oracle["psnr_median"] >= noised.score.summary()["psnr_median"] - 1e-6
    assert counted == list(range(1, 25)), "two attempts, one after the other"
