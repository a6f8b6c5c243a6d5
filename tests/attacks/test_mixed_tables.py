"""Tables of mixed types: read from CSV, attacked on simplices, judged cell by cell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gradveil.attacks.methods.table import TableAttack
from gradveil.attacks.observation.observe import observe
from gradveil.attacks.observation.views import Public
from gradveil.attacks.tables import decode, encode, groups_of, guess_mixed, read_csv, score_mixed
from gradveil.errors import ConfigError, DataError
from gradveil.mechanism.strategies import parameters


@pytest.fixture
def people(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    lines = ["age,work,town,children,income"]
    for _ in range(300):
        age, work, town = (int(torch.randint(n, (), generator=generator)) for n in (60, 4, 6))
        income = "high" if age > 25 and work else "low"
        lines.append(f"{20 + age},{'abcd'[work]},town {town},{int(torch.randint(4, (), generator=generator))},{income}")
    path = tmp_path / "people.csv"
    path.write_text("\n".join([*lines, "33,,town 1,2,low"]) + "\n")
    return read_csv(path, "income")


def net(table):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(table.features, 32), nn.Sigmoid(), nn.Linear(32, len(table.classes))).eval()


def seen(table, batch, **settings):
    count = 4 * batch
    x, y = table.x[:count].view(4, batch, -1), table.y[:count].view(4, batch)
    return observe(
        net(table), x, y, classes=2, generator=torch.Generator().manual_seed(1), view="batch",
        public=Public(table.x[count:], table.y[count:]), **settings,
    )  # fmt: skip


def test_a_csv_file_becomes_numbers_and_simplices(people):
    assert [(c.name, c.width) for c in people.columns] == [("age", 1), ("work", 4), ("town", 6), ("children", 4)]
    assert people.x.shape == (300, 15) and people.classes == ("high", "low")  # the row with an empty cell is left out
    for column, group in zip(people.columns, groups_of(people.columns), strict=True):
        assert not column.values or bool((people.x[:, group].sum(1) == 1).all())
    assert torch.allclose(encode(decode(people.x, people.columns), people.columns), people.x, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 2])
def test_rows_come_back_cell_by_cell(people, batch):
    observation, secret = seen(people, batch)
    found = TableAttack(people.columns, restarts=3).run(observation, iterations=200)
    score = score_mixed(found.x, secret.x, people.columns)
    guess = guess_mixed(people.x[50:], secret.x, people.columns)
    assert score.cells > 0.9 > 0.7 > guess.cells and score.categories > 0.9


def test_under_noise_the_answer_is_what_is_expected_anyway(people):
    plan = parameters("baseline", steps=1, clip=1.0, sigma=50.0)
    observation, secret = seen(people, 1, plan=plan, training_batch=1)
    found = TableAttack(people.columns, restarts=2).run(observation, iterations=100)
    guess = guess_mixed(people.x[50:], secret.x, people.columns)
    assert abs(score_mixed(found.x, secret.x, people.columns).cells - guess.cells) < 0.35


def test_what_makes_no_sense_is_refused(tmp_path, people):
    with pytest.raises(DataError, match="does not exist"):
        read_csv(tmp_path / "nowhere.csv", "income")
    with pytest.raises(ConfigError, match="no column 'wealth'"):
        read_csv(tmp_path / "people.csv", "wealth")
    (tmp_path / "empty.csv").write_text("a,b\n")
    with pytest.raises(DataError, match="no complete row"):
        read_csv(tmp_path / "empty.csv", "a")
    with pytest.raises(DataError, match="none of"):
        encode([["30", "z", "town 1", "1"]], people.columns)
    observation, _ = seen(people, 1)
    with pytest.raises(ConfigError, match="the columns have 1 features"):
        TableAttack(people.columns[:1]).run(observation, iterations=1)
