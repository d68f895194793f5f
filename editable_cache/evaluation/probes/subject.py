"""The model under study: its blocks, heads and residual stream, found by running it once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from editable_cache.adapters import host, measured
from editable_cache.adapters.attention import AttentionCall, tracing
from editable_cache.adapters.wrappers import inner_model
from editable_cache.errors import Reason, UnsupportedModelError

TRIAL_TOKENS = 5
"""Tokens of the forward that finds the parts."""

TOLERANCE = 1e-3
"""Relative error up to which parts of the residual stream must add up."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A causal language model whose cache holds keys and values of every token at every layer.

    Attributes:
        model: in evaluation mode, without wrappers.
        tokenizer: its own.
        blocks: the decoder's blocks, one for each cache layer.
        projections: output projection of each block's attention; its input is the heads side by side.
        num_heads, head_dim: of that input.
        writers: of each block, the module whose output attention adds to the residual stream; empty where what a block
            adds is not attention plus one other thing.
        norm: what stands between the last block and the vocabulary, or None where it was not found.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    blocks: tuple[nn.Module, ...]
    projections: tuple[nn.Module, ...]
    num_heads: int
    head_dim: int
    writers: tuple[nn.Module, ...]
    norm: nn.Module | None

    @classmethod
    def of(cls, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Subject:
        """Run the model on a few tokens and find its parts.

        Raises:
            UnsupportedModelError: if a layer holds something else than keys and values of every token, if the model
                does not go on rightly from a cache, or if its attention can't be watched.
        """
        inner = inner_model(model)
        kind = type(inner).__name__
        layout = host.cache_layout(inner.config)
        foreign = [Reason(f"layer {i}", "keys and values", found) for i, found in enumerate(layout.kinds)
                   if found != "plain"]  # fmt: skip
        if foreign:
            raise UnsupportedModelError(
                f"probe: the cache of this {kind} holds more than keys and values of every token, so that what its "
                "layers hold can't be exchanged token by token; choose a model with plain attention layers.",
                tuple(foreign[:5]),
            )
        against = measured(inner).against_continuing
        if against:
            raise UnsupportedModelError(f"probe: this {kind} does not go on rightly from a cache (measured).", against)
        return _found(cls, inner, tokenizer)

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def lens(self, stream: Tensor) -> Tensor:
        """Logits ``[..., vocab]`` that residual streams ``[..., hidden_size]`` would lead to if no block followed.

        The logit lens (nostalgebraist 2020): final norm and vocabulary. Squeezing of logits, which keeps their order,
        is left out.

        Raises:
            UnsupportedModelError: if the final norm was not found.
        """
        if self.norm is None:
            raise UnsupportedModelError(
                f"probe: no final norm was found in {type(self.model).__name__}, so its residual stream can't be read "
                "through the vocabulary; leave the probe 'timing' out."
            )
        model: Any = self.model
        head = model.get_output_embeddings()
        with torch.no_grad():
            found: Tensor = head(self.norm(stream.to(head.weight)))
        return found.float().cpu()


@contextmanager
def hooked(handles: Iterator[Any] | list[Any]) -> Iterator[None]:
    """Remove hooks when the context ends."""
    with ExitStack() as undo:
        for handle in handles:
            undo.callback(handle.remove)
        yield


def first_tensor(value: Any) -> Tensor:
    """A tensor, or the first of a tuple, which is how blocks and attention modules return theirs."""
    found = value[0] if isinstance(value, tuple) else value
    assert isinstance(found, Tensor)
    return found


def entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The residual stream among the arguments of a block."""
    for given in (*args, *kwargs.values()):
        if isinstance(given, Tensor) and given.dim() == 3 and given.is_floating_point():
            return given
    raise UnsupportedModelError("probe: a block was called without a residual stream of three dimensions.")


def _found(cls: type[Subject], model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Subject:
    calls: dict[int, tuple[nn.Module, int, int]] = {}

    def record(call: AttentionCall) -> None:
        calls[call.layer_idx] = (call.projection, int(call.output.shape[-2]), int(call.output.shape[-1]))

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(host.num_embeddings(model), (1, TRIAL_TOKENS), generator=generator)
    cache = host.full_cache(model.config)
    with tracing(model, record):
        host.run(model, ids, cache)
    wanted = list(range(len(cache.layers)))
    if sorted(calls) != wanted or len({(heads, size) for _, heads, size in calls.values()}) != 1:
        raise UnsupportedModelError(
            f"probe: expected the attention of each of {len(wanted)} layers with heads of one size, saw "
            f"{sorted(calls)} in {type(model).__name__}."
        )
    projections = tuple(calls[i][0] for i in wanted)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = tuple(_block_with(lists, projection) for projection in projections)
    _, num_heads, head_dim = calls[0]
    writers, norm = _trial(model, ids, blocks, projections)
    return cls(model, tokenizer, blocks, projections, num_heads, head_dim, writers, norm)


def _block_with(lists: list[nn.ModuleList], part: nn.Module) -> nn.Module:
    for listed in lists:
        for block in listed:
            if any(module is part for module in block.modules()):
                return block
    raise UnsupportedModelError("probe: the attention of this model does not stand in a list of blocks.")


@dataclass(frozen=True, eq=False)
class _Call:
    module: nn.Module
    given: Tensor | None
    made: Tensor


def _trial(
    model: nn.Module, ids: Tensor, blocks: tuple[nn.Module, ...], projections: tuple[nn.Module, ...]
) -> tuple[tuple[nn.Module, ...], nn.Module | None]:
    """The writers of all blocks, none if one was not found; and the final norm."""
    inner: dict[nn.Module, list[_Call]] = {block: [] for block in blocks}
    entered: dict[nn.Module, Tensor] = {}
    left: dict[nn.Module, Tensor] = {}
    after: list[_Call] = []

    def tensor(value: Any) -> Tensor | None:
        found = value[0] if isinstance(value, tuple) and value else value
        return found if isinstance(found, Tensor) and found.is_floating_point() else None

    def watch(calls: list[_Call], module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        made, given = tensor(output), [*map(tensor, (*args, *kwargs.values())), None]
        if made is not None:
            calls.append(_Call(module, given[0], made))

    def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
        entered[block] = entering(args, kwargs)

    def leave(block: nn.Module, args: Any, output: Any) -> None:
        left[block] = first_tensor(output)
        after.clear()

    handles = []
    for block in blocks:
        handles += [block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)]
        for child in block.children():
            hook = _bound(watch, inner[block])
            handles.append(child.register_forward_hook(hook, with_kwargs=True))
    decoder = _parent(model, blocks)
    for child in decoder.children():
        if not isinstance(child, nn.ModuleList):
            handles.append(child.register_forward_hook(_bound(watch, after), with_kwargs=True))
    with hooked(handles):
        logits = host.run(model, ids, host.full_cache(model.config))
    found = [
        _writer(inner[block], entered[block], left[block], projection)
        for block, projection in zip(blocks, projections, strict=True)
    ]
    writers = tuple(each for each in found if each is not None)
    norms = [call.module for call in after if call.given is left[blocks[-1]]]
    norm = norms[0] if len(norms) == 1 else None
    if norm is not None:
        head: Any = model
        with torch.no_grad():
            again = head.get_output_embeddings()(norm(left[blocks[-1]]))
        if not torch.equal(again[0].argmax(-1), logits[0].argmax(-1)):
            norm = None
    return writers if len(writers) == len(blocks) else (), norm


def _bound(watch: Any, calls: list[_Call]) -> Any:
    return lambda module, args, kwargs, output: watch(calls, module, args, kwargs, output)


def _parent(model: nn.Module, blocks: tuple[nn.Module, ...]) -> nn.Module:
    """The module whose list the blocks stand in."""
    for module in model.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and any(block is blocks[0] for block in child):
                return module
    return model


def _writer(calls: list[_Call], entered: Tensor, left: Tensor, projection: nn.Module) -> nn.Module | None:
    """The module whose output attention adds to the stream: the attention, or a norm right behind it."""
    holds = [any(module is projection for module in call.module.modules()) for call in calls]
    if sum(holds) != 1:
        return None
    at = holds.index(True)
    candidates = [calls[at]]
    candidates += [call for call in calls[at + 1 :] if call.given is calls[at].made]
    for candidate in reversed(candidates):
        rest = left - entered - candidate.made
        bound = TOLERANCE * float(rest.abs().max())
        others = [call.made for call in calls if call.module is not candidate.module and call.made.shape == rest.shape]
        if any(float((other - rest).abs().max()) <= bound for other in others):
            return candidate.module
    return None
