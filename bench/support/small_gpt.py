"""JobSpec fields of a small GPT on tinyshakespeare, nanoGPT's setting for a CPU."""

from typing import Any

ADAMW: dict[str, Any] = {"name": "AdamW", "lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1}
GPT: dict[str, Any] = {
    "dataset": "tinyshakespeare",
    "model": "gpt",
    "model_args": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "dropout": 0.0},
    "clip_norm": 1.0,
    "decay": "matrices",
    "evaluate_every": 0,
}
