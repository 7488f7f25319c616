"""Small Hugging Face folders of several families, with random weights: made by configuration alone."""

from pathlib import Path
from typing import Any

VOCAB = 512
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {
        "model_type": "qwen2",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "llama": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "gemma": {
        "model_type": "gemma",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 8,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "mistral": {
        "model_type": "mistral",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 24,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "decoder_sparse_step": 1,
    },
    "olmoe": {
        "model_type": "olmoe",
        "hidden_size": 32,
        "intermediate_size": 8,
        "num_experts": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
"""Family -> keys of its `config.json`, as `model.config` of a run takes them."""


def make_folder(folder: Path, family: str = "qwen2", seed: int = 0, **changes: Any) -> Path:
    """Writes a model and the bundled tokenizer, as `save_pretrained` does."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from app.bundled import build_tokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(build_tokenizer(folder.parent / "tokenizers", VOCAB)))
    keys = {
        "vocab_size": VOCAB,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        **SHAPES[family],
        **changes,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
