"""One rule per kind of layer: how it runs with the batch first, and what its per-example gradients are."""
