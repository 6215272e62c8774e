"""What a stand-in model server is told: its names, its speed, its cache and its limits."""

from __future__ import annotations

from dataclasses import dataclass

ENGINES = ("vllm", "sglang", "trtllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class StandinSettings:
    """Settings of one stand-in; ValueError for a figure that makes no sense.

    `engine` is the one it passes for: vllm, sglang or trtllm. Rates may be `math.inf` and
    the overhead 0, then nothing is ever waited for. `adapters` are LoRA names served
    beside the model. With `strict_models` an unknown model is a 404; without it every name
    is served, each as its own cache namespace. `max_inflight` counts sequences, waiting
    and running; None refuses nobody. `max_body_bytes` is a hard limit: a longer body is a
    413.
    """

    model: str = "standin"
    engine: str = "vllm"
    adapters: tuple[str, ...] = ()
    strict_models: bool = False
    prefill_tokens_per_s: float = 20_000.0
    prefill_chunk_tokens: int = 2_048
    decode_tokens_per_s: float = 200.0
    first_token_overhead_s: float = 0.005
    cache_tokens: int = 200_000
    block_tokens: int = 16
    default_max_tokens: int = 16
    max_model_tokens: int = 1_048_576
    max_inflight: int | None = None
    max_body_bytes: int = 64 * 1024 * 1024
    shutdown_timeout_s: float = 0.25

    def __post_init__(self) -> None:
        positive = (
            "prefill_tokens_per_s",
            "prefill_chunk_tokens",
            "decode_tokens_per_s",
            "block_tokens",
            "default_max_tokens",
            "max_model_tokens",
            "max_body_bytes",
        )
        for name in positive:
            if not getattr(self, name) > 0:
                message = f"{name} must be above 0"
                raise ValueError(message)
        if self.engine not in ENGINES:
            message = f"engine must be one of {', '.join(ENGINES)}"
            raise ValueError(message)
        if self.cache_tokens < self.block_tokens:
            message = "cache_tokens must hold at least one block"
            raise ValueError(message)
        if not self.first_token_overhead_s >= 0 or not self.shutdown_timeout_s >= 0:
            message = "first_token_overhead_s and shutdown_timeout_s must not be negative"
            raise ValueError(message)
        if self.max_inflight is not None and self.max_inflight < 1:
            message = "max_inflight must be at least 1 or None"
            raise ValueError(message)

    @property
    def cache_blocks(self) -> int:
        """How many whole blocks the cache holds."""
        return self.cache_tokens // self.block_tokens
