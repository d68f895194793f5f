"""How the weights of the zoo are drawn: strong enough that attention, positions, values and states all matter.

A default-initialised tiny model hides almost every fault: its attention is flat and its recurrent layers add less than
float32 can show. Matrices are drawn with standard deviation gain / sqrt(fan-in), which keeps the scale of a hidden
state, and the decay and step size of recurrent layers where a state lives for tens of tokens. Tables that the model
computes (sinusoidal positions, inverse frequencies) stay.
"""

from __future__ import annotations

import math
import re
import zlib

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

EMBEDDING_STD = 0.6
MATRIX_GAIN = 1.2
QUERY_KEY_GAIN = 1.5
VECTOR_STD = 0.1
GATE_STD = 0.5

DECAY = (0.5, 8.0)
"""Range of A, the decay of a state per unit of step size."""

STEP = (0.005, 0.2)
"""Range of the step size that `dt_bias` alone gives, drawn on a log scale (Mamba draws 0.001 to 0.1)."""

_QUERY_KEY = re.compile(
    r"(q_proj|k_proj|qkv|query|key|c_attn|q_a_|q_b_|kv_a_|kv_b_|wq|wk|linear_q|linear_k|index|qk_|in_proj_qk|attn\.in_)"
)
_FIXED_TABLE = re.compile(r"[Ss]inusoid|Sincos|RotaryEmbedding")


def seed_of(name: str, seed: int) -> int:
    """A seed that depends on the model's name and on the number, and on nothing else."""
    return zlib.crc32(f"{name}:{seed}".encode())


@torch.no_grad()
def draw(model: PreTrainedModel, name: str, seed: int) -> None:
    """Draw every weight of `model` anew, in place, the same for the same name and seed. No global generator is used."""
    generator = torch.Generator().manual_seed(seed_of(name, seed))
    seen: set[int] = set()
    for path, module in model.named_modules():
        fixed = _FIXED_TABLE.search(type(module).__name__) is not None
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or fixed or not parameter.requires_grad or not parameter.is_floating_point():
                continue
            seen.add(id(parameter))
            drawn = _drawn(parameter.detach().float(), module, f"{path}.{leaf}".lower(), leaf, generator)
            parameter.copy_(drawn.to(parameter.dtype))


def _drawn(value: Tensor, module: nn.Module, path: str, leaf: str, generator: torch.Generator) -> Tensor:
    """New values for one parameter, float32, of its shape."""

    def normal(std: float) -> Tensor:
        return torch.randn(value.shape, generator=generator) * std

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(value.shape, generator=generator)

    if leaf.lower() == "a_log":
        return uniform(*DECAY).log()
    if leaf == "dt_bias" or path.endswith("dt_proj.bias"):
        step = uniform(math.log(STEP[0]), math.log(STEP[1])).exp()
        return step + torch.log(-torch.expm1(-step))  # the inverse of softplus
    if leaf == "recurrent_param":  # RG-LRU (Griffin, section 2.4): decay per token is exp(-8 softplus(p) sigmoid(gate))
        return torch.expm1(-uniform(0.9, 0.999).log() / 4).log()
    if isinstance(module, nn.Embedding) or ("embed" in path and value.dim() == 2 and not isinstance(module, nn.Linear)):
        return normal(EMBEDDING_STD)
    if value.dim() < 2 or "norm" in type(module).__name__.lower() or "norm" in leaf:
        gate = value.numel() > 0 and bool((value == 0).all()) and "bias" not in leaf and "norm" not in path
        return value + normal(GATE_STD if gate else VECTOR_STD)
    gain = QUERY_KEY_GAIN if _QUERY_KEY.search(path) else MATRIX_GAIN
    return normal(gain / math.sqrt(_fan_in(value, module)))


def _fan_in(value: Tensor, module: nn.Module) -> int:
    if isinstance(module, Conv1D):
        return value.shape[0]
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return max(1, value[0].numel())
    return max(1, value.shape[-1])
