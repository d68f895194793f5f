"""Claims that small models on a processor can't tell: sections 5 to 9 of the study, appendices D to I."""

from __future__ import annotations

from editable_cache.evaluation.report.claim import Claim

BIG = "The models (8B to 70B) need accelerators and downloads that are not had here."

BEYOND = (
    Claim(
        "linear-time",
        "5, figure 6a",
        "A spliced skill is ready in time linear in its length, a full prefill's is quadratic.",
        "3 times at 2k tokens, 9.8 at 8k, 13.9 at 32k (8B)",
        reason="Lengths and model are beyond 2 cores. Measured on SmolLM2-135M at 2k and 6k tokens: docs/speed.md.",
    ),
    Claim(
        "unified-agent",
        "6, figure 7b",
        "One agent that composes its policy once and appends errata decides as one that reads all again each turn.",
        "agreement 0.81 to 1.00, up to 14.9 times faster, 13 models",
        reason=f"{BIG} Its two parts are measured here by themselves: editing inside a transplant, and 28 turns of "
        "errata.",
    ),
    Claim(
        "family-of-models",
        "5, 6, appendix A",
        "All of this holds from 0.6B to 70B, in FP8 and 4 bits, and on mixtures of experts.",
        "12 and 13 models",
        reason=f"{BIG} Structures are covered with random weights: docs/architectures.md.",
    ),
    Claim(
        "memory-placement",
        "7, E1",
        "A memory read late costs accuracy, the more the longer it is.",
        "GEE coefficient -0.44, p = 0.018; 0.16 at 32k tokens (Qwen3-4B)",
        reason="Needs models that reason over memories of 2k to 32k tokens; the gatekeepers were trained on prompts of "
        "a few hundred.",
    ),
    Claim(
        "memory-70b",
        "7, E2",
        "At 70B a memory spliced late decides as a full prefill, and better than one spliced early.",
        "0.93 against 0.83, cosine 0.997",
        reason=BIG,
    ),
    Claim(
        "memory-editing-by-scale",
        "7, E3",
        "With a chain of thought the edit in place gets better with the size of the model.",
        "0.92, 0.99, 1.00 (Qwen3-1.7B, 4B, 14B); stale 0.03 at most",
        reason=f"{BIG} What an edit in place does with a chain is measured by the claims on editing.",
    ),
    Claim(
        "memory-editing-inside",
        "7",
        "Inside a spliced memory the field alone recovers half, more tokens more.",
        "0.55, 0.84 at 16 tokens, 0.94 (Llama-3.1-70B)",
        reason=f"{BIG} Editing inside a transplant is measured by the claims on section 6.",
    ),
    Claim(
        "locomo",
        "7, figure 11",
        "On real conversations a spliced memory answers as well as a full prefill.",
        "within 0.015 (TOST, 1,540 questions); -2.7 points on Llama-3.1-8B",
        reason="LoCoMo may not be used here (restricted), and its 20k-token dialogues are beyond these models.",
    ),
    Claim(
        "memory-granularity",
        "7, E4, figure 24",
        "A memory of independent facts may be cut into 16 blocks without changing a decision.",
        "agreement 1.00 at S = 16; cosine 0.998 to 0.953 (Qwen3-4B)",
        reason="Needs a model that decides by several facts of a long memory with a chain of thought. Two blocks are "
        "measured by the claims on cross-referential facts, up to four by those on several skills.",
    ),
    Claim(
        "memory-agent",
        "7, E5, figure 12",
        "An agent that composes and edits its memory is ready 2.3 to 4.3 times sooner, at cosines of 0.97 to 0.99.",
        "2.3 to 4.3 times, to 32B",
        reason=BIG,
    ),
    Claim(
        "images",
        "8, figures 13b and 21",
        "A cached image is as good as one that is encoded again, and far cheaper.",
        "agreement 0.958 to 1.0; 2.4 to 8.4 times faster",
        reason="No weights of a vision-language model are had here. That images move exactly is shown with random "
        "weights: docs/vision.md, docs/numerics.md.",
    ),
    Claim(
        "latent-attention",
        "8, figure 20a",
        "With multi-head latent attention only the small rotary part must be turned.",
        "cosine 0.98, agreement 1.00 (DeepSeek-Coder-V2-Lite)",
        reason="No trained model with this attention is had here; the arithmetic is tested: docs/architectures.md.",
    ),
    Claim(
        "real-environment",
        "9",
        "In the retail environment of tau2-bench a stale cache fails the task, the line together with the field keeps "
        "it.",
        "task success kept",
        reason="Needs a model that drives a tool-using agent through the environment.",
    ),
    Claim(
        "serving",
        "9, figure 14a, appendix I",
        "In a server the appended line keeps the prefix in the cache.",
        "98.5 % against 1 % hit rate; 53 to 398 times lower p90 (vLLM)",
        reason="vLLM on an accelerator under load is not had here.",
    ),
)
