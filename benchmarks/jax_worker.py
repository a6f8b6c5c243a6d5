"""One training step in JAX for each line read: plain SGD, or JAX-Privacy's clipped gradients with Gaussian noise.

Started by jax_peer.py in a virtual environment of its own; imports neither torch nor gradveil. The first line it
prints holds the loss of the first batch, which must be that of the same network in PyTorch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

TASK = json.loads(sys.argv[1])
if hasattr(os, "sched_setaffinity"):  # XLA makes as many threads as it sees cores: as many as PyTorch was given
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: TASK["threads"]])

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import jax_privacy  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax_privacy import noise_addition  # noqa: E402

RATE, CLIP, SIGMA = 0.01, 1.0, 1.0
LAYOUT = ("NHWC", "HWIO", "NHWC")
Params = dict[str, jax.Array]


def network(layers: list[dict[str, Any]], arrays: dict[str, np.ndarray]) -> tuple[Params, Callable[..., jax.Array]]:
    """Parameters and forward function; images are (examples, height, width, channels), the fast layout of XLA."""
    params: Params = {}
    channels = spatial = 0
    if arrays["x"].ndim == 4:
        channels, spatial = arrays["x"].shape[1], arrays["x"].shape[2]
    flattened = False
    for layer in layers:
        if layer["kind"] in ("conv", "linear"):
            weight, bias = arrays[f"weight:{layer['name']}.weight"], arrays.get(f"weight:{layer['name']}.bias")
            if layer["kind"] == "conv":
                channels = weight.shape[0]
                weight = weight.transpose(2, 3, 1, 0)
            else:
                if flattened:  # PyTorch flattens channels first
                    weight = weight.reshape(-1, channels, spatial, spatial).transpose(0, 2, 3, 1)
                    flattened = False
                weight = weight.reshape(weight.shape[0], -1).T
            params[f"{layer['name']}.weight"] = jnp.asarray(weight)
            if bias is not None:
                params[f"{layer['name']}.bias"] = jnp.asarray(bias)
        elif layer["kind"] == "maxpool2d":
            spatial //= 2
        elif layer["kind"] == "flatten":
            flattened = spatial > 0

    def forward(params: Params, x: jax.Array) -> jax.Array:
        for layer in layers:
            if layer["kind"] == "relu":
                x = jax.nn.relu(x)
            elif layer["kind"] == "maxpool2d":
                x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            elif layer["kind"] == "flatten":
                x = x.reshape(x.shape[0], -1)
            else:
                weight = params[f"{layer['name']}.weight"]
                if layer["kind"] == "linear":
                    x = x @ weight
                else:
                    pads = [(p, p) for p in layer["padding"]]
                    x = jax.lax.conv_general_dilated(
                        x, weight, (1, 1), pads, dimension_numbers=("NHWC", "HWIO", "NHWC")
                    )
                x = x + params.get(f"{layer['name']}.bias", 0.0)
        return x

    return params, forward


def main() -> None:
    with np.load(TASK["arrays"]) as stored:
        arrays = dict(stored)
    params, forward = network(TASK["layers"], arrays)
    x, y = arrays["x"], arrays["y"]
    x = jnp.asarray(x.transpose(0, 2, 3, 1) if x.ndim == 4 else x)
    y = jnp.asarray(y)
    batch = len(y)

    def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(forward(params, x))
        return -jnp.mean(jnp.take_along_axis(scores, y[:, None], 1))

    def maker(microbatch: int | None) -> tuple[Callable[..., tuple[Params, Any]], Any]:
        """A compiled step and the state of its noise."""
        if TASK["private"]:
            clipped = jax_privacy.clipped_grad(
                loss, l2_clip_norm=CLIP, batch_argnums=(1, 2), normalize_by=batch, microbatch_size=microbatch
            )
            privatizer = noise_addition.gaussian_privatizer(stddev=SIGMA * CLIP / batch, prng_key=0)
        else:
            clipped, privatizer = jax.grad(loss), optax.identity()

        @jax.jit
        def step(params: Params, state: Any, x: jax.Array, y: jax.Array) -> tuple[Params, Any]:
            grads, state = privatizer.update(clipped(params, x, y), state)
            return jax.tree.map(lambda p, g: p - RATE * g, params, grads), state

        return step, privatizer.init(params)

    def seconds(step: Callable[..., tuple[Params, Any]], state: Any) -> float:
        start = time.perf_counter()
        jax.block_until_ready(step(params, state, x, y))
        return time.perf_counter() - start

    # How many examples are vectorised at once decides its speed by up to 40 times: the best of three is taken.
    sizes = [None, 1, max(n for n in range(1, 51) if batch % n == 0)] if TASK["private"] else [None]
    made = {size: maker(size) for size in sizes}
    taken = {size: (seconds(*made[size]), seconds(*made[size]))[1] for size in sizes}  # the first one compiles
    best = min(sizes, key=lambda size: taken[size])
    step, state = made[best]
    first = {
        "loss": float(loss(params, x, y)),
        "microbatch": best or batch,
        "versions": {"jax": jax.__version__, "jax-privacy": jax_privacy.__version__},
    }
    print(json.dumps(first), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        params, state = jax.block_until_ready(step(params, state, x, y))
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
