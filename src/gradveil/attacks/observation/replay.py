"""Work on tensors that stay in place, replayed as a CUDA graph: a small model leaves a GPU waiting for Python."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradveil.clipping.backends import graphs

_WARM_UPS = 2  # eager rounds before the capture: libraries choose their algorithms


class Replay:
    """``work`` reads and writes tensors that stay where they are, and makes no decision by their values.

    On CUDA it is captured after a few rounds and replayed from then on; work that cannot be captured (a model that
    looks at values on the host) goes on as it is, and so does work on other devices.
    """

    def __init__(self, work: Callable[[], None], device: torch.device) -> None:
        self._work, self._device = work, device
        self._rounds = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._eager = device.type != "cuda"

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        elif self._eager:
            self._work()
        elif self._rounds < _WARM_UPS:
            self._rounds += 1
            self._warm_up()
        else:
            self._capture()
            self()

    def _warm_up(self) -> None:
        here, side = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            self._work()
        here.wait_stream(side)

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with graphs.capturing(graph):
                self._work()
        except RuntimeError:
            self._eager = True
            torch.cuda.synchronize(self._device)
        else:
            self._graph = graph
