"""gradveil inside other people's tools. Each file needs one extra, says so, and imports without it.

    logging.py       TensorBoard and MLflow                      gradveil[tensorboard], gradveil[mlflow]
    lightning.py     a LightningModule and a Trainer             gradveil[lightning]
    huggingface.py   transformers.Trainer                        gradveil[huggingface]

docs/integrations.md has the code; what would break the stated bound is refused there by name.
"""
