"""Watch a run in TensorBoard. pip install 'gradveil[tensorboard]'; then: tensorboard --logdir runs/boards"""

import gradveil
from gradveil.integrations.logging import TensorBoardProgress, log_run

with TensorBoardProgress("runs/boards/live") as board:
    run = gradveil.train(dataset="digits", strategy="dyn-s-decay", steps=60, progress=board)
    board.finish(run)

with TensorBoardProgress("runs/boards/exported") as board:  # the same of any finished run directory
    log_run(run.run_dir, to=board)
