"""Weights that come back: a copy is kept of what is changed, and written back bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def restored(*tensors: Tensor) -> Iterator[None]:
    """Give ``tensors`` their present bits back when the context ends, by an exception too.

    The tensors are written in place, so they keep their storage. Memory: one copy of them while the context lasts.
    """
    copies = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
