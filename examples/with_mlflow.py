"""Keep a run in MLflow. pip install 'gradveil[mlflow]'"""

import os
from pathlib import Path

import gradveil
from gradveil.integrations.logging import MLflowProgress

os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # a folder here; with a server, give its address instead
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # MLflow reports its use to its makers otherwise

with MLflowProgress(experiment="digits", tracking_uri=Path("runs/mlflow").resolve().as_uri()) as board:
    run = gradveil.train(dataset="digits", strategy="baseline", steps=60, progress=board)
    board.finish(run)
