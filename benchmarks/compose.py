"""Speed and memory of composing: `python benchmarks/compose.py [--quick]` writes `results/compose.json`.

Every output is verified before it is timed. Baselines are stock transformers in the same process.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timing
import torch
from torch import Tensor
from transformers import DynamicCache

from editable_cache import EditableCache, Skill
from editable_cache.testing.real_models import load_smollm2

POLICY = Path(__file__).parents[1] / "examples" / "refund_policy.txt"
SYSTEM = "You are a support agent. Follow the policy to the letter.\n\n"
QUESTION = "\nCustomer: my order is still pending, please refund it to my card.\nDecision of the agent:"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true", help="short skill, few rounds, no result file")
    quick = arguments.parse_args().quick
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    model, tokenizer = load_smollm2()
    result: dict[str, Any] = {"model": "SmolLM2-135M-Instruct, float32"}
    for length in (256,) if quick else (2048, 6144):
        rounds = 3 if quick else (7 if length < 4096 else 3)
        result[f"skill_{length}"] = first_token(model, tokenizer, length, rounds)
    result["decode"] = decode(model, tokenizer, 256 if quick else 4096, 4 if quick else 24)
    result["fork"] = fork(model, tokenizer, (64, 256) if quick else (256, 4096))
    for name, values in result.items():
        print(name, values)
    if not quick:
        print(timing.write("compose", result))


def first_token(model: Any, tokenizer: Any, length: int, rounds: int) -> dict[str, Any]:
    """Time to the first token: load + splice + question against a full prefill; the splice alone against a copy."""
    skill_ids = _ids(tokenizer, length)
    question = tokenizer(QUESTION, add_special_tokens=False)["input_ids"][:20]
    prefix = tokenizer(SYSTEM, add_special_tokens=False)["input_ids"]
    everything = torch.tensor([[*prefix, *skill_ids, *question]])
    skill = Skill.precompile(model, tokenizer, skill_ids, name="policy")
    base = EditableCache(model, tokenizer=tokenizer)
    base.append(prefix)
    state: dict[str, Any] = {}

    def fresh() -> None:
        state.clear()
        gc.collect()
        state["cache"], state["stock"] = base.fork(), DynamicCache()
        for layer_idx, layer in enumerate(base.layers):
            state["stock"].update(layer.keys, layer.values, layer_idx)

    with tempfile.TemporaryDirectory() as folder:
        skill.save_pretrained(folder)

        def full() -> Tensor:
            return model(everything, cache=DynamicCache(), logits_to_keep=1).logits[0, -1]

        def composed(seam_tokens: int) -> Callable[[], Tensor]:
            def run() -> Tensor:
                cache: EditableCache = state["cache"]
                cache.splice(Skill.from_pretrained(folder), seam_tokens=seam_tokens)
                return model(torch.tensor([question]), cache=cache, logits_to_keep=1).logits[0, -1]

            return run

        variants: dict[str, Callable[[], Any]] = {
            "full_prefill": full,
            "splice_seam_0": composed(0),
            "splice_seam_1": composed(1),
        }
        cosine = {}
        for name, run in variants.items():
            fresh()
            cosine[name] = float(torch.cosine_similarity(run(), full(), dim=0))
        assert min(cosine.values()) > 0.8, cosine
        _verify_splice(base, skill)
        fresh()
        hand, mine = (ask(model, state[name], skill, question) for name, ask in _WAYS)
        assert torch.cosine_similarity(hand, mine, dim=0) > 0.999
        seconds = timing.paired(
            timing.with_progress(variants, f"first token, {length} tokens"), rounds=rounds, prepare=fresh
        )
        by_hand = timing.paired(
            {
                "by_hand": lambda: _ask_by_hand(model, state["stock"], skill, question),
                "splice": lambda: _ask(model, state["cache"], skill, question),
            },
            rounds=2 * rounds,
            prepare=fresh,
        )
        single = _one_thread(variants, fresh, max(rounds // 3, 1))
        alone = timing.paired(
            {
                "copy": lambda: _copy(skill, state["stock"]),
                "splice": lambda: state["cache"].splice(skill, seam_tokens=0),
            },
            rounds=3 * rounds,
            prepare=fresh,
        )
        fresh()
        memory = _peak_memory(lambda: state["cache"].splice(skill, seam_tokens=0), skill.nbytes)
    return {
        "skill_tokens": length,
        "question_tokens": len(question),
        "cosine_to_full_prefill": {name: round(value, 5) for name, value in cosine.items()},
        "full_prefill": timing.milliseconds(seconds["full_prefill"]),
        "load_splice_question": timing.milliseconds(seconds["splice_seam_0"]),
        "load_splice_seam_1_question": timing.milliseconds(seconds["splice_seam_1"]),
        "speedup": timing.ratios(seconds["full_prefill"], seconds["splice_seam_0"]),
        "speedup_seam_1": timing.ratios(seconds["full_prefill"], seconds["splice_seam_1"]),
        "one_thread_cpu_speedup": single,
        "splice_question_in_memory": timing.milliseconds(by_hand["splice"]),
        "by_hand_over_splice": timing.ratios(by_hand["by_hand"], by_hand["splice"]),
        "splice_alone": timing.milliseconds(alone["splice"]),
        "plain_copy": timing.milliseconds(alone["copy"]),
        "splice_over_copy": timing.ratios(alone["splice"], alone["copy"]),
        "peak_memory_over_chunk": memory,
    }


def _one_thread(variants: dict[str, Callable[[], Any]], fresh: Callable[[], None], rounds: int) -> dict[str, Any]:
    """The same ratio in processor time of one thread: what the work costs, whatever else the machine does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pair = {name: variants[name] for name in ("full_prefill", "splice_seam_0")}
    seconds = timing.paired(pair, rounds=rounds, prepare=fresh, clock=time.process_time)
    torch.set_num_threads(threads)
    return timing.ratios(seconds["full_prefill"], seconds["splice_seam_0"])


def decode(model: Any, tokenizer: Any, length: int, tokens: int) -> dict[str, Any]:
    """Token-by-token decoding behind a long context, against ``DynamicCache``."""
    ids = torch.tensor([_ids(tokenizer, length)])
    mine, stock = EditableCache(model), DynamicCache()
    for cache in (mine, stock):
        model(ids, cache=cache, logits_to_keep=1)

    def step(cache: Any, kept: list[int]) -> Callable[[], None]:
        def run() -> None:
            token = torch.tensor([[kept[-1]]])
            kept.append(int(model(token, cache=cache, logits_to_keep=1).logits[0, -1].argmax()))

        return run

    first = int(ids[0, -1])
    tokens_mine, tokens_stock = [first], [first]
    seconds = timing.paired({"editable": step(mine, tokens_mine), "dynamic": step(stock, tokens_stock)}, rounds=tokens)
    assert tokens_mine == tokens_stock
    return {
        "context_tokens": length,
        "editable": timing.milliseconds(seconds["editable"]),
        "dynamic": timing.milliseconds(seconds["dynamic"]),
        "dynamic_over_editable": timing.ratios(seconds["dynamic"], seconds["editable"]),
    }


def fork(model: Any, tokenizer: Any, lengths: tuple[int, int]) -> dict[str, Any]:
    """A fork of a long cache against one of a short cache, and against a deep copy."""
    caches = []
    for length in lengths:
        caches.append(EditableCache(model, tokenizer=tokenizer))
        caches[-1].append(_ids(tokenizer, length))
    short, long = caches
    assert torch.equal(long.fork().next_token_logits(), long.next_token_logits())
    seconds = timing.paired({"short": short.fork, "long": long.fork}, rounds=50)
    return {
        "tokens": lengths,
        "long": timing.milliseconds(seconds["long"]),
        "long_over_short": timing.ratios(seconds["long"], seconds["short"]),
    }


def _ids(tokenizer: Any, length: int) -> list[int]:
    text = POLICY.read_text(encoding="utf-8")
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return (ids * (length // len(ids) + 1))[:length]


def _copy(skill: Skill, stock: DynamicCache) -> None:
    """The same bytes behind the same prefix in a stock cache, not rotated, so that its positions are wrong."""
    for layer_idx, states in enumerate(skill.layers):
        stock.update(states["keys"], states["values"], layer_idx)


def _ask(model: Any, cache: EditableCache, skill: Skill, question: list[int]) -> Tensor:
    cache.splice(skill, seam_tokens=0)
    return model(torch.tensor([question]), cache=cache, logits_to_keep=1).logits[0, -1]


def _ask_by_hand(model: Any, stock: DynamicCache, skill: Skill, question: list[int]) -> Tensor:
    """What one would write without this library: rotate by a fixed angle, concatenate, ask. No check of any kind."""
    length = stock.get_seq_length()
    angle = length * model.model.rotary_emb.inv_freq
    cos, sin = torch.cat((angle, angle)).cos(), torch.cat((angle, angle)).sin()
    for layer_idx, states in enumerate(skill.layers):
        keys = states["keys"]
        half = keys.shape[-1] // 2
        turned = keys * cos + torch.cat((-keys[..., half:], keys[..., :half]), dim=-1) * sin
        stock.update(turned, states["values"], layer_idx)
    return model(torch.tensor([question]), cache=stock, logits_to_keep=1).logits[0, -1]


_WAYS = (("stock", _ask_by_hand), ("cache", _ask))


def _verify_splice(base: EditableCache, skill: Skill) -> None:
    cache = base.fork()
    cache.splice(skill, seam_tokens=0)
    found = cache.verify()
    assert found.ok, found


def _peak_memory(run: Callable[[], Any], chunk_bytes: int) -> float:
    """Most bytes that ``run`` holds at once, over the chunk's bytes; the chunk's place in the cache is one of them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    memory = [event for event in events if event.get("name") == "[memory]"]
    held = [event["args"]["Bytes"] for event in sorted(memory, key=lambda event: event["ts"])]
    return round(max(itertools.accumulate(held), default=0) / chunk_bytes, 3)


if __name__ == "__main__":
    main()
