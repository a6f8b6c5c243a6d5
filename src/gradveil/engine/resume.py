"""What a checkpoint holds of an engine, and how an engine goes on from one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gradveil.errors import ConfigError, RunDirectoryError
from gradveil.mechanism.noise.streams import SecretKey

if TYPE_CHECKING:
    from gradveil.engine.engine import PrivacyEngine


def state_dict(engine: PrivacyEngine) -> dict[str, Any]:
    """What a checkpoint needs to go on: step, the bound rule's state, and what was spent.

    Holds no seed and no generator state. An engine that has the run's ledger goes on from it; one that has a new
    ledger takes over what was spent, so that its budget and statement are right.
    """
    engine.commit()
    ledger = engine.ledger
    rule = engine.rule.state_dict() if engine.plan.strategy.is_private else {}
    engine._pins.add((ledger.length, ledger.head))
    return {
        "step": engine.step,
        "ledger_length": ledger.length,
        "ledger_head": ledger.head,
        "rule": rule,
        "spent": ledger.export_spent(),
    }


def load_state_dict(engine: PrivacyEngine, state: Mapping[str, Any]) -> None:
    """Go on from a checkpoint. Releases that the ledger holds beyond it stay charged.

    Refused where this engine's ledger is not the one of the checkpoint and the checkpoint does not say what was
    spent: earlier steps would not be charged. Refused too where the checkpoint's run declared steps that this one
    would not charge: a run that may have stopped on released values is charged for all it declared.
    """
    step = int(state["step"])
    if not 0 <= step <= engine.plan.steps:
        raise ConfigError(f"the checkpoint is of step {step}, the run has {engine.plan.steps}.")
    _take_over_spent(engine, state)
    if engine._private is None:
        engine._plain_steps = step
        engine._batches.start()
        return
    if not engine._run_key.seeded:
        # Steps already released may come again: with a new key, samples are independent of theirs.
        engine._run_key = SecretKey().told(engine.ranks.from_first)
        engine._private.renew(engine._run_key)
    engine._log.go_on()
    engine._batches.start()  # loops that are under way draw for steps of before
    engine._private.index = step
    engine.rule.load_state_dict(state["rule"])
    engine._private.prepare()


def _take_over_spent(engine: PrivacyEngine, state: Mapping[str, Any]) -> None:
    ledger, pin = engine.ledger, (int(state["ledger_length"]), str(state["ledger_head"]))
    if engine.ranks.from_first(lambda: pin in engine._pins or ledger.holds(*pin)):
        return
    spent = state.get("spent")
    if spent is not None and (not ledger.releases or ledger.took_over(*pin)):
        ledger.import_spent(spent)  # once: loading the same checkpoint again charges nothing more
        return
    raise RunDirectoryError(
        f"the checkpoint is of step {state['step']} of a run whose ledger had {pin[0]} lines, and this engine's "
        f"ledger is another one ({ledger.length} lines): what was released before would not be charged. Give the "
        "engine the run_dir of that run, and resume=True; or load the checkpoint into an engine that has released "
        "nothing yet."
    )
