"""Without its package, an integration can be imported, and says at first use which extra brings it."""

from __future__ import annotations

import subprocess
import sys

import pytest

USES = {
    "tensorboard": "logging import TensorBoardProgress; TensorBoardProgress('x')",
    "mlflow": "logging import MLflowProgress; MLflowProgress()",
    "lightning": "lightning import PrivateTraining; PrivateTraining(engine)",
    "huggingface": "huggingface import PrivateTrainer; PrivateTrainer(engine=engine)",
}


@pytest.mark.parametrize("extra", USES)
def test_a_missing_package_is_named_with_its_extra(extra):
    package = "accelerate" if extra == "huggingface" else extra
    code = f"""
import sys
sys.modules[{package!r}] = None
import gradveil
engine = gradveil.PrivacyEngine(clip=1.0, sigma=1.0, steps=1)
from gradveil.integrations.{USES[extra]}
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1
    assert f"pip install 'gradveil[{extra}]'" in ran.stderr.splitlines()[-1]
