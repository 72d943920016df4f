"""Model pairs that are meant for each other: a draft of the target's family, with its tokenizer, much smaller.

A list to choose from, not a limit; `outrider pairs TARGET DRAFT` checks any two.
"""

from __future__ import annotations

from dataclasses import dataclass

BILLION = 10**9


@dataclass(frozen=True, slots=True)
class KnownPair:
    """Hugging Face ids and parameters of both; `note` tells what to know before choosing it."""

    target: str
    target_parameters: float
    draft: str
    draft_parameters: float
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.target_parameters / self.draft_parameters


def _pair(target: str, target_b: float, draft: str, draft_b: float, note: str = "") -> KnownPair:
    return KnownPair(f"mlx-community/{target}", target_b * BILLION, f"mlx-community/{draft}", draft_b * BILLION, note)


KNOWN_PAIRS = (
    _pair("Llama-3.3-70B-Instruct-4bit", 70.6, "Llama-3.2-1B-Instruct-4bit", 1.24, "of the paper's families"),
    _pair("Meta-Llama-3.1-8B-Instruct-4bit", 8.03, "Llama-3.2-1B-Instruct-4bit", 1.24, "draft large for the target"),
    _pair("Qwen3-32B-4bit", 32.8, "Qwen3-0.6B-4bit", 0.6, "of the paper's families"),
    _pair("Qwen3-14B-4bit", 14.8, "Qwen3-0.6B-4bit", 0.6),
    _pair("Qwen3-8B-4bit", 8.2, "Qwen3-0.6B-4bit", 0.6),
    _pair("Qwen2.5-32B-Instruct-4bit", 32.8, "Qwen2.5-0.5B-Instruct-4bit", 0.49),
    _pair("Qwen2.5-Coder-32B-Instruct-4bit", 32.8, "Qwen2.5-Coder-0.5B-Instruct-4bit", 0.49, "code"),
    _pair("Qwen2.5-Coder-7B-Instruct-4bit", 7.6, "Qwen2.5-Coder-0.5B-Instruct-4bit", 0.49, "code"),
    _pair("gemma-3-27b-it-4bit", 27.4, "gemma-3-1b-it-4bit", 1.0, "text only"),
    _pair("Mistral-Large-Instruct-2407-4bit", 123.0, "Mistral-7B-Instruct-v0.3-4bit", 7.25, "needs 80 GB"),
)
