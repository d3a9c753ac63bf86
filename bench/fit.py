"""Find what batch of GPT-2 (124M) fits an RTX 4090, by planning alone: ``python bench/fit.py``.

bfloat16, 1,024 tokens, dropout 0.1, AdamW; no GPU is used, times are by the GPU's roofline.
"""

from __future__ import annotations

from real_sizes import gpt2_124m

import fxckpt


def main() -> None:
    """Print every size that was tried."""
    found = fxckpt.fit(lambda batch: gpt2_124m(batch=batch), device="RTX 4090")
    print(found)
    free = [t for t in found.trials if t.plan is not None and not t.plan.recompute_seconds]
    print(f"largest batch without recompute, among these: {free[-1].size}")


if __name__ == "__main__":
    main()
