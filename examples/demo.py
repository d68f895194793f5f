"""Answer from a cache that was composed and edited instead of recomputed.

Run it with ``make demo``, or with other options:

    python examples/demo.py --model smollm2     # default: a small real model, no Hub needed
    python examples/demo.py --model tiny        # random weights, seconds; the answers are noise
    python examples/demo.py --model some/model  # from the Hub
    python examples/demo.py --quick             # a shorter policy and fewer rounds
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import demo_scene
import torch
from demo_arms import compare_arms
from demo_measure import cosine, first_token, full_prefill_first_token, kl, plain_prefill, time_paired
from demo_scene import FIRST_QUESTION, NEW, OLD, RECORD, SYSTEM, Scene
from rich.console import Console
from rich.table import Table

from editable_cache import EditableCache, Skill

console = Console(width=None if Console().is_terminal else 100)


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    console.rule("1. A model and a policy")
    with console.status("loading the model (the first time it is downloaded and converted: a minute or two)"):
        scene = demo_scene.load(options.model, quick=options.quick)
    skill = compile_skill(scene)
    cache = compose(scene, skill)
    compare_with_full_prefill(scene, skill, cache, rounds=3 if options.quick else 5)
    answer_first_question(scene, cache, tokens=8 if options.quick else 32)
    compare_arms(console, scene, cache, tokens=4 if options.quick else 12)
    finish(scene, cache)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compose and edit a KV cache, and compare with recomputing it.")
    parser.add_argument("--model", default="smollm2", help="smollm2 (default), gemma3_270m, tiny, or a Hub id")
    parser.add_argument("--quick", action="store_true", help="a shorter policy, shorter answers, fewer rounds")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--threads", type=int, default=min(cores, 8), help="threads of torch")
    return parser.parse_args()


def compile_skill(scene: Scene) -> Skill:
    """Compile the policy once, save it, and read it back as another process would."""
    text = scene.turn("system", scene.policy)
    with console.status("precompiling the policy: self-test of the model, then one prefill"):
        compiled = Skill.precompile(scene.model, scene.tokenizer, text, name="refund-policy")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        compiled.save_pretrained(folder)
        skill = Skill.from_pretrained(  # our own, and meant: the system turn of a chat
            folder, model=scene.model, tokenizer=scene.tokenizer, control_tokens="allow"
        )
        files = ", ".join(sorted(os.listdir(folder)))
    console.print(
        f"{type(scene.model).__name__}, {torch.get_num_threads()} threads. The policy was computed once, alone, "
        f"without knowing what it will stand behind:\n{skill}, {skill.nbytes / 2**20:.1f} MiB, saved as {files} and "
        f"read back{' bit for bit' if skill.equal_cells(compiled) else ' WITH DIFFERENCES'}."
    )
    return skill


def compose(scene: Scene, skill: Skill) -> EditableCache:
    """System turn, spliced policy, order record."""
    console.rule("2. Put the context together")
    cache = EditableCache(scene.model, tokenizer=scene.tokenizer)
    fill(scene, skill, cache)
    for outcome in cache.history:
        console.print(f"  {outcome}")
    console.print("The policy was written into the cache. Only its first token, the seam, was computed again.")
    return cache


def fill(scene: Scene, skill: Skill, cache: EditableCache) -> None:
    cache.append(scene.turn("system", SYSTEM), name="system")
    cache.splice(skill)
    cache.append(scene.turn("system", RECORD), name="order", fields={"order_status": OLD})


def compare_with_full_prefill(scene: Scene, skill: Skill, cache: EditableCache, rounds: int) -> None:
    """Is the spliced cache as good as a computed one, and how much sooner does it answer?"""
    console.rule("3. Is that as good as computing it?")
    question = scene.question(FIRST_QUESTION)
    asked = cache.fork()
    asked.append(question)
    ids, spliced = asked.token_ids, asked.next_token_logits()[0].float()
    full = plain_prefill(scene.model, ids)
    policy = asked.segment("refund-policy")
    without = plain_prefill(scene.model, torch.cat((ids[:, : policy.start], ids[:, policy.stop :]), dim=1))
    table = Table(
        title=f"next token after {ids.shape[1]} tokens, against a plain prefill of them", title_justify="left"
    )
    for column in ("", "cosine of logits", "KL (nats)", "same top token"):
        table.add_column(column)
    for label, logits in (("spliced policy", spliced), ("for scale: no policy at all", without)):
        same = "yes" if logits.argmax() == full.argmax() else "no"
        table.add_row(label, f"{cosine(logits, full):.5f}", f"{kl(full, logits):.1e}", same)
    console.print(table)

    def spliced_first_token() -> Any:
        fresh = EditableCache(scene.model, tokenizer=scene.tokenizer)
        fill(scene, skill, fresh)
        return first_token(scene.model, fresh.inputs(question), fresh)

    if spliced_first_token() != full_prefill_first_token(scene.model, ids):
        console.print("The two do not agree on the next token here, so their times are not compared.")
        return
    timed = time_paired(lambda: full_prefill_first_token(scene.model, ids), spliced_first_token, rounds)
    console.print(
        f"Time to the first token of the answer, same token both ways, median of {rounds} pairs: "
        f"{timed.slow_ms:.0f} ms with a full prefill, {timed.fast_ms:.0f} ms with the splice, "
        f"{timed.ratio:.1f} times sooner. (System turn, order and question are computed both ways; the policy is not.)"
    )


def answer_first_question(scene: Scene, cache: EditableCache, tokens: int) -> None:
    """An answer through plain ``generate``; it becomes part of the context."""
    console.rule("4. Ask, through model.generate")
    inputs = cache.inputs(scene.question(FIRST_QUESTION))
    out = scene.model.generate(**inputs, past_key_values=cache, max_new_tokens=tokens, do_sample=False)
    answer = out[:, inputs["input_ids"].shape[1] :]
    console.print(f"customer: {FIRST_QUESTION}", markup=False)
    console.print(f"model:    {scene.shown(answer[0])}", markup=False)
    ended = int(out[0, -1]) == scene.tokenizer.eos_token_id
    cache.append("\n" if ended else scene.end_of_turn, name="end of turn")


def finish(scene: Scene, cache: EditableCache) -> None:
    """Keep one of the edits, and look at what the cache knows about itself."""
    console.rule("6. Keep one edit, and check the cache")
    cache.edit("order_status", NEW, role="system" if scene.chatml else None)
    console.print(cache.report())
    console.print("verify() computes the oracles again from the cache's own record:")
    console.print(f"  {cache.verify()}", markup=False)


if __name__ == "__main__":
    main()
